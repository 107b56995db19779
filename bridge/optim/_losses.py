"""Keras losses as pure functions in optax's argument order."""

from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import keras

from bridge import keras_private
from functrain.internal import PyTree, brief, require
from functrain.internal import tree as _tree

# The reductions to a plain mean, which is also the mean of one value per example.
_MEANS = ("sum_over_batch_size", "mean")


# (outputs, labels, sample weights) -> (loss, divisor). The divisor is what the mean was divided by,
# with the meaning of `Aux.weight`: None for the number of examples, () if the loss is not a mean.
_LossAndDivisor: TypeAlias = Callable[[PyTree, PyTree, PyTree], tuple[jax.Array, Any]]
_NOT_A_MEAN = ()


class _Loss:
    """The callable that `loss` returns.

    Attributes:
      keras_loss: The Keras loss.
      with_weight: The loss with its divisor, for `functrain.supervised`.
    """

    def __init__(self, keras_loss: Any, with_weight: _LossAndDivisor) -> None:
        self.keras_loss, self.with_weight = keras_loss, with_weight

    def __repr__(self) -> str:
        return f"bridge.loss({brief(self.keras_loss)})"

    def __call__(self, outputs: PyTree, y: PyTree, sample_weight: PyTree = None) -> jax.Array:
        return self.with_weight(outputs, y, sample_weight)[0]


def loss(keras_loss: Any, *, loss_weights: Any = None) -> Callable[..., jax.Array]:
    """Returns a Keras loss as a pure function ``loss(outputs, y, sample_weight=None)``.

    It is made for `functrain.supervised`, which passes it the batch's sample weights. The loss of a
    batch then equals ``keras_loss(y, outputs, sample_weight)`` to the bit. It takes the mask that
    a Keras model attaches to its outputs, and `ignore_class`, into account, provided that the loss
    is called in the same trace as the forward pass.

    The result depends on the reduction of the Keras loss:

    - `"sum_over_batch_size"` or `"mean"` (Keras's default): the loss of each example,
      `f32[B, ...]`, times its weight and mask. Keras's loss is the plain mean of these values:
      masked values are 0, and the others are scaled up accordingly.
    - `None` or `"none"`: the values that Keras returns, `f32[B, ...]`.
    - `"sum"` and `"mean_with_sample_weight"`: Keras's scalar, `f32[]`.

    For several outputs, in a dict or list, the result is the sum of the losses, a scalar.

    `functrain.micro_batches` around `supervised` divides by the same number as Keras's loss of the
    large batch: the number of examples or of valid elements, or the sum of the weights. It raises
    ValueError for losses that are not such a mean: `"sum"`, and several outputs with different
    masks or weights.

    Args:
      keras_loss: Any loss that `compile` takes: a `keras.losses.Loss`, a name, or a function
        ``(y_true, y_pred)``. For several outputs, one loss for all of them, or a dict or list of
        losses with the keys of the outputs, in which None stands for no loss.
      loss_weights: The factors of several losses: floats in the structure of `keras_loss`.

    Returns:
      A function of outputs, labels, and weights `f32[B]` or `f32[B, ...]`. It computes in the
      dtype of the loss, by default `keras.config.floatx()`.

    Raises:
      ValueError: Keras has no such loss, or `loss_weights` does not match `keras_loss`.
        From the returned function: the outputs or labels lack a key, or are an array where an
        entry for each output is needed.

    Examples:
      >>> import keras, numpy as np
      >>> loss_fn = loss("sparse_categorical_crossentropy")
      >>> print(loss_fn(np.full((2, 4), 0.25), np.array([0, 3])))
      [1.3862944 1.3862944]
      >>> huber = loss(keras.losses.Huber(delta=2.0))
      >>> print(huber(np.ones((2, 1)), np.zeros((2, 1)), sample_weight=np.array([1.0, 0.0])))
      [0.5 0. ]
    """
    if isinstance(keras_loss, Mapping | list | tuple):
        return _Loss(keras_loss, _sum_of_losses(keras_loss, loss_weights))
    advice = "It weights several outputs. To weight examples use batches (x, y, sample_weight)."
    require(loss_weights is None, "loss_weights", "None with a single loss", loss_weights, advice)
    single_loss = _loss_of_one_output(keras_loss)

    def any_loss(outputs: PyTree, y: PyTree, sample_weight: PyTree) -> tuple[jax.Array, Any]:
        # Like `compile`, uses a single loss for each of several outputs.
        if isinstance(outputs, Mapping | list | tuple):
            losses = dict.fromkeys(_by_key(outputs), keras_loss)
            return _sum_of_losses(losses, None)(outputs, y, sample_weight)
        return single_loss(outputs, y, sample_weight)

    return _Loss(keras_loss, any_loss)


def _loss_of_one_output(keras_loss: Any, *, is_reduced: bool = False) -> _LossAndDivisor:
    """Returns the loss of one output: one value per example, or Keras's result if `is_reduced`."""
    # `compile` chooses one of several losses for "crossentropy", depending on shapes.
    if str(keras_loss).lower() not in ("crossentropy", "ce"):
        keras.losses.get(keras_loss)

    def loss_and_divisor(
        outputs: PyTree, y: PyTree, sample_weight: PyTree
    ) -> tuple[jax.Array, Any]:
        # In every call, since Keras chooses the loss for "crossentropy" by shapes.
        loss = keras_private.losses.get_loss(keras_loss, y, outputs)
        # Such a loss may do anything, also with its reduction.
        if type(loss).__call__ is not keras.losses.Loss.__call__:
            return jnp.asarray(loss(y, outputs, sample_weight)), None
        values, weight, valid = keras_private.losses.losses_and_weight(
            loss, y, outputs, sample_weight
        )
        if sample_weight is not None:
            _require_same_rank(jnp.asarray(sample_weight), values)
        is_mean = loss.reduction in _MEANS
        divisor = valid if is_mean else None
        if loss.reduction == "sum":
            divisor = _NOT_A_MEAN
        elif loss.reduction == "mean_with_sample_weight" and weight is not None:
            divisor = jnp.sum(weight)
        if is_mean and not is_reduced:
            return jnp.asarray(values if weight is None else values * weight), divisor
        # Keras's own call, with labels first.
        return jnp.asarray(loss(y, outputs, sample_weight)), divisor

    return loss_and_divisor


def _require_same_rank(sample_weight: jax.Array, values: Any) -> None:
    """Raises ValueError if weights would be broadcast along the wrong axis of the losses.

    Keras broadcasts weights `[B]` to losses `[B, B]` without an error. It drops a last axis of 1.
    """
    difference = abs(sample_weight.ndim - values.ndim)
    has_extra_axis = difference == 1 and (1,) in (sample_weight.shape[-1:], values.shape[-1:])
    is_scalar = not (sample_weight.ndim and values.ndim)
    expected = f"as many axes as the losses have, {_tree.spec(values)}"
    advice = "To weight whole sequences pass weight[:, None]."
    matches = is_scalar or difference == 0 or has_extra_axis
    require(matches, "sample_weight", expected, sample_weight, advice)


def _sum_of_losses(losses: Any, factors: Any) -> _LossAndDivisor:
    """Returns the sum of the losses of several outputs, times their factors."""
    losses = _by_key(losses)
    factors = dict.fromkeys(losses, 1.0) if factors is None else _by_key(factors)
    expected = f"a factor for each loss, {list(losses)}"
    require(factors.keys() == losses.keys(), "loss_weights", expected, factors)
    functions: dict[Any, _LossAndDivisor] = {}
    for key, keras_loss in losses.items():
        if keras_loss is not None:
            functions[key] = _loss_of_one_output(keras_loss, is_reduced=True)

    def sum_and_divisor(outputs: PyTree, y: PyTree, sample_weight: PyTree) -> tuple[jax.Array, Any]:
        total: Any = 0
        divisors = []
        for key, function in functions.items():
            output = entry_of_output(outputs, key, "outputs")
            labels = entry_of_output(y, key, "y")
            weights = sample_weight
            if isinstance(sample_weight, Mapping | list | tuple):
                weights = entry_of_output(sample_weight, key, "sample_weight")
            value, divisor = function(output, labels, weights)
            total = total + value * factors[key]
            divisors.append(divisor)
        # A sum of means with different divisors is not one mean.
        is_one_mean = len(divisors) == 1 or all(divisor is None for divisor in divisors)
        return total, divisors[0] if is_one_mean else _NOT_A_MEAN

    return sum_and_divisor


def _by_key(container: Any) -> dict[Any, Any]:
    return dict(container if isinstance(container, Mapping) else enumerate(container))


def entry_of_output(container: PyTree, key: Any, name: str) -> Any:
    """Returns the entry of one of several outputs in the outputs, the labels or the weights.

    Raises:
      ValueError: There is no entry for the output.
    """
    # An array has entries too: its examples.
    is_container = isinstance(container, Mapping | list | tuple)
    expected = f"a dict or list with an entry for each output, {key!r} among them"
    advice = "The outputs, the labels, their losses and their metrics must have the same keys."
    has_entry = is_container and key in _by_key(container)
    require(has_entry, name, expected, container, advice)
    return container[key]
