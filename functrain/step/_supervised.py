"""The loss of a model on inputs and labels."""

import contextlib
from collections.abc import Callable
from typing import Any, Literal, TypeAlias, get_args

import jax
import jax.numpy as jnp
import optax

from functrain.common import _tree
from functrain.common._checks import require, require_one_of
from functrain.common._types import PyTree
from functrain.data._batch import Part, expand_weight, select, unpack
from functrain.model._model import Model, ModelOutput, require_model
from functrain.step._loss import Aux, LossFn

Reduction: TypeAlias = Literal["mean", "weighted_mean"]


def supervised(
    model: Model,
    loss: Callable[..., jax.Array],
    *,
    reduction: Reduction = "mean",
    inputs: Part | None = None,
    labels: Part | None = None,
    sample_weight: Part | None = None,
) -> LossFn:
    """Returns the loss of a model on batches ``(x, y)`` or ``(x, y, sample_weight)``, or dicts.

    The value is the mean of the values that `loss` returns, plus the losses that the model added.
    With sample weights w and n values l, the mean is Σwl / n as in Keras (``"mean"``), or
    Σwl / Σw (``"weighted_mean"``).

    Args:
      model: The model to apply.
      loss: ``loss(outputs, y) -> f32[B, ...] or f32[]``, in optax's argument order. A scalar is
        used directly; it cannot be weighted. A loss of the next token may be shorter than the
        outputs along the later axes. Those of `bridge.loss` apply the weights themselves.
      reduction: ``"mean"`` or ``"weighted_mean"``, how per-example losses become one number.
      inputs: The part of a batch that the model gets, if batches are not tuples: a key of a dict,
        a path such as ``"text/tokens"``, or a function of the batch.
      labels: The part that the loss and the metrics get; given together with `inputs`.
      sample_weight: The part with the weights or the mask of the examples, if there is one.

    Returns:
      A LossFn. The mean is computed in float32 or wider, whatever the dtype of the outputs.

    Raises:
      TypeError: `model` is not a Model, or `loss` is a Keras loss, which takes the labels first.
      ValueError: `reduction="weighted_mean"` is combined with a loss of `bridge.loss`, or only one
        of `inputs` and `labels` is given. (When traced) the batch is not a tuple of two or three or
        lacks a part, the losses have other axes than the outputs, or sample weights do not fit the
        losses or meet a scalar loss.

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
      >>> loss_fn = supervised(model, optax.squared_error, inputs="image", labels="label")
      >>> batch = {"image": jnp.ones((4, 3)), "label": jnp.ones((4, 1))}
      >>> print(loss_fn(params, model_state, batch, rng=None, training=False)[0])
      1.0
    """
    require_one_of("reduction", reduction, get_args(Reduction))
    require_model(model)
    # With the arguments the wrong way round, a Keras loss would compute a wrong number. Its class
    # may be the user's own.
    is_of_keras = (getattr(loss, "__module__", None) or "").startswith("keras.")
    is_valid = callable(loss) and not is_of_keras and not hasattr(loss, "get_config")
    expected = "loss(outputs, y), not one of Keras, which takes the labels first"
    advice = "For the losses that Keras's compile takes, use bridge.loss(loss)."
    require(is_valid, "loss", expected, loss, advice, error=TypeError)
    # Losses of bridge.loss have this method, which applies weights, and returns the divisor.
    with_weight = getattr(loss, "with_weight", None)
    is_valid = with_weight is None or reduction == "mean"
    expected = "'mean' with a loss of bridge.loss, which has a reduction of its own"
    require(is_valid, "reduction", expected, reduction)
    has_parts = inputs is not None and labels is not None
    has_no_part = inputs is None and labels is None and sample_weight is None
    expected = "inputs and labels together, the parts of a batch that is no tuple"
    require(has_parts or has_no_part, "supervised", expected, {"inputs": inputs, "labels": labels})

    def split(batch: PyTree) -> tuple[PyTree, PyTree, PyTree]:
        if inputs is None or labels is None:
            return unpack(batch)
        weight = None
        if sample_weight is not None:
            weight = select(batch, sample_weight, "sample_weight")
        return select(batch, inputs, "inputs"), select(batch, labels, "labels"), weight

    def loss_fn(
        params: PyTree, model_state: PyTree, batch: PyTree, /, *, rng: Any, training: bool
    ) -> tuple[jax.Array, Aux]:
        x, y, weight = split(batch)
        output = apply_model(model, params, model_state, x, rng=rng, training=training)
        outputs = output.outputs
        try:
            losses = with_weight(outputs, y, weight) if with_weight else (loss(outputs, y), None)
        except Exception as error:
            # Errors of optax about shapes and dtypes do not show both arguments.
            with contextlib.suppress(Exception):
                error.add_note(f"loss(outputs, y) got {_specs(outputs)} and {_specs(y)}.")
            raise
        values, divisor = jnp.asarray(losses[0]), losses[1]
        if with_weight:
            # The loss has applied the weights, and may have reduced its values already.
            value = jnp.mean(_tree.at_least_float32(values))
        else:
            _check_shape(values, outputs)
            value, divisor = _reduce(values, weight, reduction)
        # Regularization and the like; under strict promotion, its dtype must be that of the value.
        for term in output.losses:
            value = value + jnp.asarray(term, value.dtype)
        aux = Aux(output.model_state, outputs, weight=divisor, labels=y, sample_weight=weight)
        return value, aux

    return loss_fn


def apply_model(
    model: Model, params: PyTree, model_state: PyTree, inputs: PyTree, **mode: Any
) -> ModelOutput:
    """Returns ``model.apply(...)``; raises TypeError unless that is a ModelOutput.

    With the params of `optax.lookahead`, the fast ones are trained and the slow ones evaluated.
    """
    if isinstance(params, optax.LookaheadParams):
        params = params.fast if mode.get("training", False) else params.slow
    try:
        output = model.apply(params, model_state, inputs, **mode)
    except Exception as error:
        # A state takes any params, and the error is that of the library or the user's function.
        if type(params) is tuple and len(params) == 2 and not jax.tree.leaves(model_state):
            error.add_note(
                "The params are a tuple of two. If it is what model.init returned, write "
                "params, model_state = model.init(...), and pass both to TrainState.create."
            )
        raise
    is_output = isinstance(output, ModelOutput)
    advice = "Write: return functrain.ModelOutput(outputs, model_state)"
    # `require_instance` would show the class of a tracer, not its shape.
    require(is_output, "model.apply", "a ModelOutput from it", output, advice, error=TypeError)
    return output


def _specs(tree: PyTree) -> str:
    return ", ".join(map(_tree.spec, jax.tree.leaves(tree)))


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
    # Such losses are [B, B]: they train, silently, on every pair of an output and a label. Losses
    # that are shorter than the outputs are not made by broadcasting, but of a part of the outputs.
    if not values.ndim or not _tree.is_array(outputs):
        return
    fits = values.ndim <= outputs.ndim and values.shape[0] == outputs.shape[0]
    fits = fits and all(n <= m for n, m in zip(values.shape, outputs.shape, strict=False))
    axes = f"leading axes that are those of the outputs {_tree.spec(outputs)}, or shorter"
    expected = f"a value per example, with {axes}, or one scalar"
    advice = "Give labels the shape of the outputs, for example y[:, None] or outputs[:, 0]."
    require(fits, "loss", expected, values, advice)
