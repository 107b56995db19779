"""The loss of a model on inputs and labels."""

from collections.abc import Callable, Iterator
from typing import Any, Literal, TypeAlias, get_args

import jax
import jax.numpy as jnp

from functrain.common import _tree
from functrain.common._arguments import parameters
from functrain.common._checks import require, require_instance, require_one_of
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
    require_one_of("reduction", reduction, get_args(Reduction))
    makers = "bridge.from_keras, functrain.from_linen, functrain.from_nnx or Model(init, apply)"
    require_instance("model", model, Model, "a functrain.Model", f"Make one with {makers}.")
    advice = f"For what Keras's compile takes: bridge.loss({loss!r})."
    require(callable(loss), "loss", "loss(outputs, y)", loss, advice, error=TypeError)
    taken = list(parameters(loss))
    if hasattr(loss, "get_config") or taken[:1] == ["y_true"]:
        name = getattr(loss, "__name__", type(loss).__name__)
        raise TypeError(
            f"loss: expected loss(outputs, y), got {name}, which takes the labels first. Take "
            "bridge.loss(loss) for a Keras loss, or lambda outputs, y: loss(y, outputs)."
        )
    weighs = "sample_weight" in taken
    with_weight = getattr(loss, "with_weight", None)  # bridge.loss also returns the divisor
    require(
        not weighs or reduction == "mean",
        "reduction",
        "'mean' with a loss that takes sample_weight and weighs by itself",
        reduction,
        "For a Keras loss choose its own reduction, as in "
        "bridge.loss(keras.losses.Huber(reduction='mean_with_sample_weight')).",
    )

    def loss_fn(
        params: PyTree, model_state: PyTree, /, *args: PyTree, rng: jax.Array | None, training: bool
    ) -> tuple[jax.Array, Aux]:
        x, y, weight = unpack(*args)
        output = model.apply(params, model_state, x, rng=rng, training=training)
        outputs = output.outputs
        divisor: Any = None
        try:
            if with_weight is not None:
                values, divisor = with_weight(outputs, y, weight)
            else:
                values = loss(outputs, y, sample_weight=weight) if weighs else loss(outputs, y)
        except (TypeError, ValueError) as error:
            error.add_note(_labels_note(outputs, y))
            raise
        values = jnp.asarray(values)
        if weighs:
            value = jnp.mean(_tree.at_least_float32(values))
        else:
            _check_shape(values, outputs)
            value, divisor = _reduce(values, weight, reduction)
        for term in output.losses:
            value = value + jnp.asarray(term, value.dtype)
        return value, Aux(output.model_state, outputs, weight=divisor)

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
    values = _tree.at_least_float32(values)
    if weight is None:
        return jnp.mean(values), None
    weight = expand_weight(jnp.asarray(weight).astype(values.dtype), values)
    total = jnp.sum(values * weight)
    if reduction == "mean":
        return total / jnp.asarray(values.size, values.dtype), None
    weights = jnp.sum(jnp.broadcast_to(weight, values.shape))
    # A batch of zero weights has no loss, and a NaN would end the training.
    return total / jnp.where(weights == 0, jnp.ones_like(weights), weights), weights


def _check_shape(values: jax.Array, outputs: PyTree) -> None:
    """Refuses losses that came of broadcasting outputs `[B, 1]` against labels `[B]`."""
    fits = not _tree.is_array(outputs) or values.shape == outputs.shape[: values.ndim]
    axes = f"the leading axes of the outputs {_tree.spec(outputs)}"
    expected = f"a value per example, with {axes}, or one scalar"
    advice = "Give labels the shape of the outputs, for example y[:, None] or outputs[:, 0]."
    require(fits, "loss", expected, values, advice)
