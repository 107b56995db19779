"""What a batch is made of: inputs, labels, weights, and how many examples."""

import jax
import jax.numpy as jnp

from functrain.common import _repr, _tree
from functrain.common._checks import is_number
from functrain.common._types import PyTree


def unpack(batch: PyTree) -> tuple[PyTree, PyTree, PyTree]:
    """Returns inputs, labels, and sample weights or None."""
    if not isinstance(batch, tuple | list) or len(batch) not in (2, 3):
        several = isinstance(batch, tuple | list | dict)
        got = f"{type(batch).__name__} of {len(batch)}" if several else _tree.spec(batch)
        raise ValueError(
            f"batch: expected (x, y) or (x, y, sample_weight), got {got}. Labels come with the "
            "inputs: ArrayLoader((x, y), batch_size). Several inputs or targets go into one pytree "
            "each: ({'image': a, 'text': b}, y)."
        )
    return batch[0], batch[1], batch[2] if len(batch) == 3 else None


def require_batch(batch: PyTree) -> None:
    """Refuses what is no batch but makes some.

    Raises:
      TypeError: A leaf is neither an array, nor the shape of one, nor a number.
    """
    for leaf in jax.tree.leaves(batch):
        if not (_tree.is_array(leaf) or is_number(leaf)):
            raise TypeError(
                f"batch: expected one batch, a pytree of arrays, got {_repr.brief(leaf)}. Of an "
                "ArrayLoader it is loader.batch(0, 0); of other data, next(iter(data))."
            )


def expand_weight(weight: jax.Array, values: jax.Array) -> jax.Array:
    """Gives sample weights `f32[B]` the rank of per-example losses `f32[B, ...]`."""
    if values.ndim == 0:
        raise ValueError(
            "sample_weight: expected a loss per example, f32[B], got a scalar. Return the loss "
            "of each example from `loss` (optax's losses do) instead of their mean."
        )
    if weight.ndim > values.ndim and weight.shape[-1] == 1:
        weight = weight[..., 0]
    fits = weight.ndim <= values.ndim and all(
        w in (1, v) for w, v in zip(weight.shape, values.shape, strict=False)
    )
    if not fits:
        raise ValueError(
            f"sample_weight: expected the leading axes of the losses, {_tree.spec(values)}, got "
            f"{_tree.spec(weight)}."
        )
    return weight.reshape(weight.shape + (1,) * (values.ndim - weight.ndim))


def batch_size(batch: PyTree) -> int:
    """Returns the number of examples: the first axis of the first leaf that has one."""
    return next((leaf.shape[0] for leaf in jax.tree.leaves(batch) if jnp.ndim(leaf)), 1)
