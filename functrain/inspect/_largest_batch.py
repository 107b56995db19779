"""The largest batch whose fit has room on a device."""

from typing import Any

import jax
import numpy as np

from functrain.common import _tree
from functrain.common._checks import require, require_integer
from functrain.common._types import PyTree, Step
from functrain.engine import _placement
from functrain.inspect._memory import memory
from functrain.targets._target import Target


def largest_batch(
    state: PyTree,
    step: Step[Any],
    batch: PyTree,
    *,
    multiple_of: int = 8,
    fuse: int | None = None,
    target: Target | None = None,
    sharding: _placement.ShardingArg = None,
    donate: bool = False,
) -> int:
    """Returns the largest batch size whose `memory` fits into that of the device.

    The size is doubled until it does not fit, or halved until it does, and then found by bisection,
    to within a sixteenth or `multiple_of`. Each size is compiled for, which takes seconds to
    minutes; nothing runs.

    Args:
      state: As for `memory`.
      step: As for `memory`.
      batch: A batch of any size to begin with. The first axis of all its leaves is the examples.
      multiple_of: Sizes that do not divide by this are not tried, such as 8 times the number of
        devices.
      fuse: Steps per program; by default, what ``fuse="auto"`` would choose for each size.
      target: As for `memory`.
      sharding: As for `memory`.
      donate: As for `memory`.

    Returns:
      The number of examples; 0 if not even `multiple_of` fit.

    Raises:
      ValueError: The memory of the device is not known: pass a target; or `multiple_of` is below 1.

    Examples:
      >>> import functrain as ft, jax, jax.numpy as jnp
      >>> def step(state, batch):
      ...     return state + jnp.mean(batch @ batch.T), {}
      >>> batch = jax.ShapeDtypeStruct((64, 1024), jnp.float32)
      >>> size = largest_batch(jnp.zeros(()), step, batch, target=ft.target(), multiple_of=4096)
      >>> size % 4096
      0
    """
    require_integer("multiple_of", multiple_of)
    examples = {np.shape(x)[0] for x in jax.tree.leaves(batch) if np.shape(x)}
    require(len(examples) == 1, "batch", "leaves with one first axis, the examples", batch)
    checked: dict[int, bool] = {0: True}

    def fits(count: int) -> bool:
        """Returns True if a batch of this many times `multiple_of` examples fits."""
        if count not in checked:
            shapes = _resize(batch, count * multiple_of)
            found = memory(
                state, step, shapes, fuse=fuse, target=target, sharding=sharding, donate=donate
            )
            advice = "Pass target=, such as functrain.target('tpu:v5e')."
            require(found.fits is not None, "target", "a device of known memory", target, advice)
            checked[count] = bool(found.fits)
        return checked[count]

    too_large: int = max(1, examples.pop() // multiple_of)
    while fits(too_large):
        too_large *= 2
    largest = too_large // 2
    while not fits(largest):
        too_large, largest = largest, largest // 2
    while too_large - largest > max(1, largest // 16):
        middle = (largest + too_large) // 2
        largest, too_large = (middle, too_large) if fits(middle) else (largest, middle)
    return largest * multiple_of


def _resize(batch: PyTree, examples: int) -> PyTree:
    return jax.tree.map(
        lambda x: jax.ShapeDtypeStruct((examples, *x.shape[1:]), x.dtype), _tree.shapes(batch)
    )
