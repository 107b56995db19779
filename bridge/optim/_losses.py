"""Keras losses as pure functions in optax's argument order."""

import inspect
from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import keras

from bridge import keras_private
from bridge.model import _names
from functrain.internal import PyTree, brief
from functrain.internal import tree as _tree
from functrain.metrics import Metric

# What reduces to a plain mean, so that there is a value for each example.
_MEANS = ("sum_over_batch_size", "mean")


# (outputs, labels, weights) -> the loss, and what its mean was divided by, as `Aux.weight` has it
_Measure: TypeAlias = Callable[[PyTree, PyTree, PyTree], tuple[jax.Array, Any]]
_NO_MEAN = ()


class _Loss:
    """What `loss` returns."""

    def __init__(self, keras_loss: Any, measure: _Measure) -> None:
        self.keras_loss, self.with_weight = keras_loss, measure

    def __repr__(self) -> str:
        return f"bridge.loss({brief(self.keras_loss)})"

    def __call__(self, outputs: PyTree, y: PyTree, sample_weight: PyTree = None) -> jax.Array:
        return self.with_weight(outputs, y, sample_weight)[0]


def loss(keras_loss: Any, *, loss_weights: Any = None) -> Callable[..., jax.Array]:
    """Returns a Keras loss as a pure function ``loss(outputs, y, sample_weight=None)``.

    For `functrain.supervised`, which hands it the batch's sample weights: the loss of a batch is
    then what ``keras_loss(y, outputs, sample_weight)`` gives, to the bit. The mask that a Keras
    model leaves on its outputs counts, and so does `ignore_class`, as long as the loss is called
    in the trace of the forward pass.

    What it returns depends on the reduction:

    - `"sum_over_batch_size"` or `"mean"` (Keras's default): the loss of each example,
      `f32[B, ...]`, times its weight and its mask, of which Keras's loss is the plain mean. What
      is masked is 0, and the others are scaled up by its share.
    - `None` or `"none"`: what Keras gives, `f32[B, ...]`.
    - `"sum"` and `"mean_with_sample_weight"`: Keras's scalar, `f32[]`.

    Of several outputs, in a dict or list, the losses are added up, which gives a scalar.

    `functrain.micro_batches` around `supervised` divides by what Keras's loss of the large batch
    divides by: examples, valid elements or weights. It refuses what is no such mean: `"sum"`, and
    several outputs with masks or weights of their own to divide by.

    Args:
      keras_loss: What `compile` takes: a `keras.losses.Loss`, a name, a function
        ``(y_true, y_pred)``. For several outputs one for all, or a dict or list of these with
        the keys of the outputs, where None stands for no loss.
      loss_weights: With several losses, their factors: floats in the structure of `keras_loss`.

    Returns:
      A function of outputs, labels, and weights `f32[B]` or `f32[B, ...]`. It computes in the
      loss's own dtype, `keras.config.floatx()` unless it says otherwise.

    Raises:
      TypeError: `keras_loss` is nothing that Keras takes for a loss, or takes outputs first.
      ValueError: There is no such name, or `loss_weights` does not fit. From the function: the
        outputs or labels lack a key.

    Examples:
      >>> import keras, numpy as np
      >>> loss_fn = loss("sparse_categorical_crossentropy")
      >>> print(loss_fn(np.full((2, 4), 0.25), np.array([0, 3])))
      [1.3862944 1.3862944]
      >>> huber = loss(keras.losses.Huber(delta=2.0))
      >>> print(huber(np.ones((2, 1)), np.zeros((2, 1)), sample_weight=np.array([1.0, 0.0])))
      [0.5 0. ]
    """
    if isinstance(keras_loss, Mapping | list | tuple) and not isinstance(keras_loss, Metric):
        return _Loss(keras_loss, _several(keras_loss, loss_weights))
    if loss_weights is not None:
        raise ValueError(
            f"loss_weights: expected None with a single loss, got {loss_weights!r}. It weighs "
            "several outputs; to weigh examples use batches (x, y, sample_weight)."
        )
    measure = _measure_of(keras_loss, "keras_loss")

    def of_any_outputs(outputs: PyTree, y: PyTree, sample_weight: PyTree) -> tuple[jax.Array, Any]:
        if isinstance(outputs, Mapping | list | tuple):  # one for all, as `compile` does it
            each = {key: keras_loss for key, _ in _items(outputs)}
            return _several(each, None)(outputs, y, sample_weight)
        return measure(outputs, y, sample_weight)

    return _Loss(keras_loss, of_any_outputs)


def _measure_of(keras_loss: Any, where: str, *, is_reduced: bool = False) -> _Measure:
    """Returns a loss of one output: its values whose mean it is, or what Keras reduces them to."""
    _check(keras_loss, where)

    def measure(outputs: PyTree, y: PyTree, sample_weight: PyTree) -> tuple[jax.Array, Any]:
        loss = keras_private.losses.get_loss(keras_loss, y, outputs)
        if loss.reduction in _MEANS and not (is_reduced or _calls_itself(loss)):
            values, weight, valid = keras_private.losses.losses_and_weight(
                loss, y, outputs, sample_weight
            )
            if sample_weight is not None:
                _check_weight(sample_weight, values)
            return jnp.asarray(values if weight is None else values * weight), valid
        value = jnp.asarray(loss(y, outputs, sample_weight))
        if is_reduced and value.ndim:
            raise ValueError(
                f"{where}: expected a loss that reduces to a scalar, got values of shape "
                f"{value.shape}. With several losses take reduction='sum_over_batch_size'."
            )
        return value, _divisor(loss, y, outputs, sample_weight)

    return measure


def _divisor(found: Any, y: PyTree, outputs: PyTree, sample_weight: PyTree) -> Any:
    """Returns what a loss is divided by, as `Aux.weight` has it."""
    if _calls_itself(found) or found.reduction in (None, "none"):
        return None
    if found.reduction == "sum":
        return _NO_MEAN
    _, weight, valid = keras_private.losses.losses_and_weight(found, y, outputs, sample_weight)
    if found.reduction in _MEANS:
        return valid
    return None if weight is None else jnp.sum(weight)


def _calls_itself(loss: Any) -> bool:
    """Whether a loss has a `__call__` of its own, of which nothing but the result is known."""
    return type(loss).__call__ is not keras.losses.Loss.__call__


def _check_weight(sample_weight: PyTree, values: Any) -> None:
    """Refuses weights that would be broadcast along the wrong axis, as Keras lets them."""
    have, want = jnp.shape(sample_weight), values.shape
    if len(have) == len(want) + 1 and have[-1] == 1:
        have = have[:-1]
    if len(want) == len(have) + 1 and want[-1] == 1:
        want = want[:-1]
    fits = len(have) == len(want) and all(w in (1, v) for w, v in zip(have, want, strict=True))
    if have and want and not fits:
        raise ValueError(
            f"sample_weight: expected as many axes as the losses have, {_tree.spec(values)}, got "
            f"shape {jnp.shape(sample_weight)}. To weigh whole sequences pass weight[:, None]."
        )


def _several(losses: Any, factors: Any) -> _Measure:
    """Returns the sum of the losses of several outputs, times their factors."""
    if isinstance(factors, Mapping | list | tuple):
        factors = dict(_items(factors))
    keys = [key for key, _ in _items(losses)]
    if factors is not None and (not isinstance(factors, dict) or set(factors) != set(keys)):
        raise ValueError(f"loss_weights: expected a factor for each loss, {keys}, got {factors!r}")
    measures = {
        key: _measure_of(one, f"keras_loss[{key!r}]", is_reduced=True)
        for key, one in _items(losses)
        if one is not None
    }
    if not measures:
        raise ValueError(f"keras_loss: expected at least one loss, got {losses!r}")

    def measure(outputs: PyTree, y: PyTree, sample_weight: PyTree) -> tuple[jax.Array, Any]:
        total: Any = 0
        divisors = []
        for key, one in measures.items():
            weights = sample_weight
            if isinstance(sample_weight, Mapping | list | tuple):
                weights = part_of(sample_weight, key, "sample_weight")
            value, divisor = one(part_of(outputs, key, "outputs"), part_of(y, key, "y"), weights)
            total = total + (value * factors[key] if factors else value)
            divisors.append(divisor)
        alike = len(divisors) == 1 or all(divisor is None for divisor in divisors)
        return total, divisors[0] if alike else _NO_MEAN

    return measure


def _items(tree: Any) -> list[tuple[Any, Any]]:
    return list(tree.items() if isinstance(tree, Mapping) else enumerate(tree))


def part_of(tree: PyTree, key: Any, name: str) -> Any:
    """Returns what belongs to one of several outputs: of the outputs, of the labels, of weights."""
    try:
        return tree[key]
    except (KeyError, IndexError, TypeError):
        has = list(tree) if isinstance(tree, Mapping) else type(tree).__name__
        if isinstance(tree, list | tuple):
            has = f"{has} of {len(tree)}"
        raise ValueError(
            f"{name}: expected a dict or list with an entry for each output, got none for "
            f"{key!r} in {has}. The outputs, the labels, their losses and their metrics must have "
            "the same keys."
        ) from None


def _check(keras_loss: Any, where: str) -> None:
    """Refuses what Keras would fail on later, or would call the wrong way round."""
    expected = f"{where}: expected a keras.losses.Loss, a name or a function (y_true, y_pred)"
    if isinstance(keras_loss, keras.Metric | Metric):
        raise TypeError(f"{expected}, got {type(keras_loss).__name__}")
    if str(keras_loss).lower() not in ("crossentropy", "ce"):  # chosen by shapes, as `compile` does
        _names.require_known(keras_loss, keras.losses, expected)
    if inspect.isfunction(keras_loss):
        first = next(iter(inspect.signature(keras_loss).parameters), "")
        if first in ("outputs", "logits", "predictions", "log_predictions", "y_pred"):
            raise TypeError(
                f"{where}: expected a function (y_true, y_pred), as Keras calls it, got "
                f"{keras_loss.__name__}, whose first argument is {first!r}. A function that takes "
                "the outputs first goes into functrain.supervised as it is."
            )
