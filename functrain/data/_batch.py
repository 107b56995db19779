"""The parts of a batch: inputs, labels and weights."""

from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

import jax

from functrain.common import _tree
from functrain.common._checks import require
from functrain.common._types import PyTree

Part: TypeAlias = str | Callable[[PyTree], PyTree]
"""A part of a batch: a key, a path such as ``"text/tokens"``, or a function of the batch."""


def select(batch: PyTree, part: Part, argument: str) -> PyTree:
    """Returns a part of a batch.

    Args:
      batch: The batch.
      part: The part.
      argument: The argument with which the user chose it, for the error.

    Raises:
      ValueError: The batch has no such key.
    """
    if callable(part):
        return part(batch)
    # A key may contain a slash itself.
    is_key = isinstance(batch, Mapping) and part in batch
    selected: Any = batch
    for key in [part] if is_key else str(part).split("/"):
        is_dict = isinstance(selected, Mapping)
        got = sorted(map(str, selected)) if is_dict else selected
        advice = "A function selects from any batch, such as lambda batch: batch[0]."
        require(is_dict and key in selected, argument, f"{part!r} in the batch", got, advice)
        selected = selected[key]
    return selected


def unpack(batch: PyTree) -> tuple[PyTree, PyTree, PyTree]:
    """Returns inputs, labels, and sample weights or None."""
    is_tuple = isinstance(batch, tuple | list) and len(batch) in (2, 3)
    advice = (
        "Pass ArrayLoader((x, y), batch_size), several inputs as one pytree; or name the parts of "
        "a dict: supervised(model, loss, inputs='image', labels='label')."
    )
    require(is_tuple, "batch", "(x, y) or (x, y, sample_weight)", batch, advice)
    return batch[0], batch[1], batch[2] if len(batch) == 3 else None


def expand_weight(weight: jax.Array, values: jax.Array) -> jax.Array:
    """Reshapes sample weights `f32[B]` to the rank of per-example losses `f32[B, ...]`."""
    advice = (
        "Return the loss of each example from `loss` (as optax's losses do) instead of their mean."
    )
    require(values.ndim, "sample_weight", "a loss per example, float32[B]", values, advice)
    # A column of weights, `f32[B, 1]`, counts as `f32[B]`.
    if weight.ndim > values.ndim and weight.shape[-1] == 1:
        weight = weight[..., 0]
    # The leading axes of the losses, each of which may be 1 in the weights.
    pairs = zip(weight.shape, values.shape, strict=False)
    fits = weight.ndim <= values.ndim and all(n in (1, length) for n, length in pairs)
    expected = f"the leading axes of the losses, {_tree.spec(values)}"
    advice = "A metric whose values have other axes takes weighted=False."
    require(fits, "sample_weight", expected, weight, advice)
    return weight.reshape(weight.shape + (1,) * (values.ndim - weight.ndim))
