"""The loss of a model on inputs and labels."""

from collections.abc import Callable, Iterator
from typing import Any, Literal, TypeAlias

import jax
import jax.numpy as jnp

from functrain.common import _tree
from functrain.common._arguments import parameters
from functrain.common._types import PyTree
from functrain.data._batch import expand_weight, unpack
from functrain.model._model import Model
from functrain.step._loss import Aux, LossFn

Reduction: TypeAlias = Literal["mean", "weighted_mean"]


def supervised(
    model: Model,
    loss: Callable[..., jax.Array],
    *,
    reduction: Reduction = "mean",
) -> LossFn:
    """Returns the loss of a model on batches ``(x, y)`` or ``(x, y, sample_weight)``.

    The value is the mean of the per-example losses, plus the losses the model added itself. With
    sample weights w and per-example losses l of batch size B, it is Σwl / B as in Keras
    (``"mean"``), or Σwl / Σw (``"weighted_mean"``).

    Args:
      model: What to apply.
      loss: ``loss(outputs, y) -> f32[B, ...] or f32[]``, in optax's argument order. A scalar is
        taken as it is; it cannot be weighted. A loss with a parameter `sample_weight`, such as
        those of `bridge.loss`, is given the weights, or None, and weighs by itself: the mean of
        what it returns is taken.
      reduction: How per-example losses become one number.

    Returns:
      A LossFn. The mean is taken in float32 or wider, whatever the outputs' dtype.

    Raises:
      TypeError: `model` is no Model, or `loss` a Keras loss, which takes the labels first.
      ValueError: `reduction="weighted_mean"` meets a loss that weighs by itself. (When traced) the
        batch is no tuple of two or three, the losses have not the leading axes of the outputs, or
        sample weights meet a loss that is a scalar already, or their shapes do not fit.

    Examples:
      >>> import jax, jax.numpy as jnp, optax
      >>> from functrain import ModelOutput
      >>> model = Model(
      ...     init=lambda key, x: ({"w": jnp.zeros((3, 1))}, {}),
      ...     apply=lambda p, s, x, *, rng=None, training=False: ModelOutput(x @ p["w"], s),
      ... )
      >>> loss_fn = supervised(model, optax.squared_error)
      >>> params, model_state = model.init(jax.random.key(0), None)
      >>> batch = jnp.ones((4, 3)), jnp.ones((4, 1))
      >>> value, aux = loss_fn(params, model_state, batch, rng=None, training=False)
      >>> print(value, aux.outputs.shape)
      1.0 (4, 1)
    """
    if reduction not in ("mean", "weighted_mean"):
        raise ValueError(f"reduction: expected 'mean' or 'weighted_mean', got {reduction!r}")
    if not isinstance(model, Model):
        raise TypeError(
            f"model: expected a functrain.Model, got {type(model).__name__}. Make one with "
            "bridge.from_keras, functrain.from_linen or functrain.from_nnx, or Model(init, apply)."
        )
    if not callable(loss):
        raise TypeError(
            f"loss: expected loss(outputs, y), got {loss!r}. For what Keras's compile takes: "
            f"bridge.loss({loss!r})."
        )
    taken = list(parameters(loss))
    if hasattr(loss, "get_config") or taken[:1] == ["y_true"]:
        name = getattr(loss, "__name__", type(loss).__name__)
        raise TypeError(
            f"loss: expected loss(outputs, y), got {name}, which takes the labels first, as "
            "Keras's losses do. Take bridge.loss(loss), which also knows sample weights and "
            "masks; or swap them: lambda outputs, y: loss(y, outputs)."
        )
    weighs = "sample_weight" in taken
    says = getattr(loss, "with_weight", None)  # those of bridge: the divisor of their mean as well
    if weighs and reduction != "mean":
        raise ValueError(
            "reduction: expected 'mean' with a loss that takes sample_weight and weighs by "
            f"itself, got {reduction!r}. For a Keras loss choose its own reduction, as in "
            "bridge.loss(keras.losses.Huber(reduction='mean_with_sample_weight'))."
        )

    def loss_fn(
        params: PyTree,
        model_state: PyTree,
        /,
        *args: PyTree,
        rng: jax.Array | None,
        training: bool,
    ) -> tuple[jax.Array, Aux]:
        x, y, weight = unpack(*args)
        outputs, model_state, added = model.apply(
            params, model_state, x, rng=rng, training=training
        )
        own: Any = None
        try:
            if says is not None:
                found, own = says(outputs, y, weight)
            else:
                found = loss(outputs, y, sample_weight=weight) if weighs else loss(outputs, y)
        except (TypeError, ValueError) as error:
            error.add_note(_labels_note(outputs, y))
            raise
        values = jnp.asarray(found)
        if not weighs:
            _check_shape(values, outputs)
        value, divisor = _reduce(values, None if weighs else weight, reduction)
        for term in added:
            value = value + jnp.asarray(term, value.dtype)
        return value, Aux(model_state, outputs, weight=own if weighs else divisor)

    return loss_fn


def _labels_note(outputs: PyTree, y: PyTree) -> str:
    """Says what a loss was given when it failed."""
    had = [", ".join(map(_tree.spec, jax.tree.leaves(tree))) for tree in (outputs, y)]
    said = f"This came from loss(outputs, y), with outputs {had[0]} and labels {had[1]}."
    return " ".join([said, *_advice(outputs, y)])


def _advice(outputs: PyTree, y: PyTree) -> Iterator[str]:
    """Yields what is mostly the matter where labels do not fit."""
    if not (_tree.is_array(outputs) and _tree.is_array(y)):
        return
    whole = jnp.issubdtype(y.dtype, jnp.integer)
    if outputs.ndim == y.ndim + 1 and outputs.shape[-1] == 1:
        yield "Give the labels the shape of the outputs, y[:, None], or take outputs[:, 0]."
    elif outputs.ndim == y.ndim + 1:
        classes = "optax.softmax_cross_entropy_with_integer_labels"
        yield (
            f"Numbers of classes go with {classes}, or as jax.nn.one_hot(y, {outputs.shape[-1]})."
            if whole
            else f"Numbers of classes are integers, y.astype(int), and go with {classes}."
        )
    elif outputs.ndim == y.ndim and y.shape[-1] == 1 < outputs.shape[-1]:
        yield "A number an example is y[:, 0]."
    elif outputs.shape == y.shape and outputs.shape[-1:] > (1,) and not whole:
        yield "Labels of the outputs' shape go with a loss such as optax.softmax_cross_entropy."


def _reduce(
    values: jax.Array, weight: jax.Array | None, reduction: Reduction
) -> tuple[jax.Array, jax.Array | None]:
    """Returns the mean, and what it was divided by if that is not the number of values."""
    dtype = values.dtype if values.dtype == jnp.float64 else jnp.float32
    values = values.astype(dtype)
    if weight is None:
        return jnp.mean(values), None
    weight = expand_weight(jnp.asarray(weight).astype(dtype), values)
    total = jnp.sum(values * weight)
    if reduction == "mean":
        return total / jnp.asarray(values.size, dtype), None
    weights = jnp.sum(jnp.broadcast_to(weight, values.shape))
    # A batch of zero weights has no loss, and a NaN would end the training.
    return total / jnp.where(weights == 0, jnp.ones((), dtype), weights), weights


def _check_shape(values: jax.Array, outputs: PyTree) -> None:
    """Refuses losses that came of broadcasting outputs `[B, 1]` against labels `[B]`."""
    shape = getattr(outputs, "shape", None)
    if shape is not None and values.shape != shape[: values.ndim]:
        raise ValueError(
            f"loss: expected a value per example, leading axes of the outputs {_tree.spec(outputs)}"
            f" (or one scalar), got {_tree.spec(values)}. Labels of another shape than the outputs "
            "are broadcast: give them the same, for example y[:, None] or outputs[:, 0]."
        )
