"""The loss of a model on inputs and labels."""

from collections.abc import Callable, Iterator
from typing import Any, Literal, TypeAlias, get_args

import jax
import jax.numpy as jnp

from functrain.common import _repr, _tree
from functrain.common._arguments import parameters
from functrain.common._checks import require, require_one_of
from functrain.common._types import PyTree
from functrain.data._batch import expand_weight, unpack
from functrain.model._model import Model, ModelOutput, require_model
from functrain.step._loss import Aux, LossFn

Reduction: TypeAlias = Literal["mean", "weighted_mean"]


def supervised(
    model: Model,
    loss: Callable[..., jax.Array],
    *,
    reduction: Reduction = "mean",
) -> LossFn:
    """Returns the loss of a model on batches ``(x, y)`` or ``(x, y, sample_weight)``.

    The value is the mean of the per-example losses, plus the losses that the model added. With
    sample weights w and per-example losses l of batch size B, it is Σwl / B as in Keras
    (``"mean"``), or Σwl / Σw (``"weighted_mean"``).

    Args:
      model: The model to apply.
      loss: ``loss(outputs, y) -> f32[B, ...] or f32[]``, in optax's argument order. A scalar is
        used directly; it cannot be weighted. A loss with a parameter `sample_weight`, such as
        those of `bridge.loss`, gets the weights, or None, and applies them; the result is the
        mean of the values that it returns.
      reduction: ``"mean"`` or ``"weighted_mean"``, how per-example losses become one number.

    Returns:
      A LossFn. The mean is computed in float32 or wider, whatever the dtype of the outputs.

    Raises:
      TypeError: `model` is not a Model, or `loss` is a Keras loss, which takes the labels first.
      ValueError: `reduction="weighted_mean"` is combined with a loss that takes `sample_weight`.
        (When traced) the batch is not a tuple of two or three, the losses do not have the leading
        axes of the outputs, or sample weights do not fit the losses or meet a scalar loss.

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
    require_model(model)
    advice = f"For the losses that Keras's compile takes, use bridge.loss({loss!r})."
    require(callable(loss), "loss", "loss(outputs, y)", loss, advice, error=TypeError)
    arguments = list(parameters(loss))
    # Loss objects of Keras have `get_config`, its loss functions begin with `y_true`.
    if hasattr(loss, "get_config") or arguments[:1] == ["y_true"]:
        raise TypeError(
            f"loss: expected loss(outputs, y), got {_repr.name(loss)}, which takes the labels "
            "first. Use bridge.loss(loss) for a Keras loss, or lambda outputs, y: loss(y, outputs)."
        )
    takes_weight = "sample_weight" in arguments
    # Losses of bridge.loss have this method, which also returns the divisor of the mean.
    with_weight = getattr(loss, "with_weight", None)
    require(
        not takes_weight or reduction == "mean",
        "reduction",
        "'mean' with a loss that takes sample_weight and applies it",
        reduction,
        "For a Keras loss, choose its reduction, as in "
        "bridge.loss(keras.losses.Huber(reduction='mean_with_sample_weight')).",
    )

    def loss_fn(
        params: PyTree, model_state: PyTree, /, *args: PyTree, rng: jax.Array | None, training: bool
    ) -> tuple[jax.Array, Aux]:
        x, y, weight = unpack(*args)
        output = apply_model(model, params, model_state, x, rng=rng, training=training)
        outputs = output.outputs
        divisor: Any = None
        try:
            if with_weight is not None:
                values, divisor = with_weight(outputs, y, weight)
            elif takes_weight:
                values = loss(outputs, y, sample_weight=weight)
            else:
                values = loss(outputs, y)
        except (TypeError, ValueError) as error:
            # optax raises these for shapes and dtypes, and does not show both arguments.
            error.add_note(_labels_note(outputs, y))
            raise
        values = jnp.asarray(values)
        if takes_weight:
            # The loss has applied the weights, and may have reduced its values already.
            value = jnp.mean(_tree.at_least_float32(values))
        else:
            _check_shape(values, outputs)
            value, divisor = _reduce(values, weight, reduction)
        # Regularization and the like; under strict promotion, its dtype must be that of the value.
        for term in output.losses:
            value = value + jnp.asarray(term, value.dtype)
        return value, Aux(output.model_state, outputs, weight=divisor)

    return loss_fn


def apply_model(
    model: Model, params: PyTree, model_state: PyTree, inputs: PyTree, **mode: Any
) -> ModelOutput:
    """Returns ``model.apply(...)``; raises TypeError unless that is a ModelOutput."""
    output = model.apply(params, model_state, inputs, **mode)
    is_output = isinstance(output, ModelOutput)
    advice = "Write: return functrain.ModelOutput(outputs, model_state)"
    # `require_instance` would show the class of a tracer, not its shape.
    require(is_output, "model.apply", "a ModelOutput from it", output, advice, error=TypeError)
    return output


def _labels_note(outputs: PyTree, y: PyTree) -> str:
    """Returns a note for an error of a loss: its arguments, and how to make the labels fit."""
    output_specs, label_specs = (
        ", ".join(map(_tree.spec, jax.tree.leaves(tree))) for tree in (outputs, y)
    )
    arguments = f"outputs {output_specs} and labels {label_specs}"
    return " ".join([f"This came from loss(outputs, y), with {arguments}.", *_advice(outputs, y)])


def _advice(outputs: PyTree, y: PyTree) -> Iterator[str]:
    """Yields advice for the usual mistakes: a missing axis, or classes in place of scores."""
    if not (_tree.is_array(outputs) and _tree.is_array(y)):
        return
    is_integer = jnp.issubdtype(y.dtype, jnp.integer)
    if outputs.ndim == y.ndim + 1 and outputs.shape[-1] == 1:
        yield "Give the labels the shape of the outputs, y[:, None], or use outputs[:, 0]."
    elif outputs.ndim == y.ndim + 1:
        sparse_loss = "optax.softmax_cross_entropy_with_integer_labels"
        if is_integer:
            one_hot = f"jax.nn.one_hot(y, {outputs.shape[-1]})"
            yield f"Integer classes need {sparse_loss}, or convert them with {one_hot}."
        else:
            yield f"Classes must be integers, y.astype(int), for {sparse_loss}."
    elif outputs.ndim == y.ndim and y.shape[-1] == 1 < outputs.shape[-1]:
        yield "If each example has one label, pass y[:, 0]."
    elif outputs.shape == y.shape and outputs.shape[-1:] > (1,) and not is_integer:
        yield "Labels with the shape of the outputs need a loss like optax.softmax_cross_entropy."


def _reduce(
    values: jax.Array, weight: jax.Array | None, reduction: Reduction
) -> tuple[jax.Array, jax.Array | None]:
    """Returns the mean, and its divisor if that is not the number of values."""
    # The mean of a large batch loses bits in half precision.
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
    """Raises ValueError for losses made by broadcasting outputs `[B, 1]` against labels `[B]`."""
    # Such losses are [B, B]: they train, silently, on every pair of an output and a label.
    has_leading_axes = not _tree.is_array(outputs) or values.shape == outputs.shape[: values.ndim]
    axes = f"the leading axes of the outputs {_tree.spec(outputs)}"
    expected = f"a value per example, with {axes}, or one scalar"
    advice = "Give labels the shape of the outputs, for example y[:, None] or outputs[:, 0]."
    require(has_leading_axes, "loss", expected, values, advice)
