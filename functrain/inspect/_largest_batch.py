"""The largest batch whose fit has room on a device."""

import math
from typing import Any

import jax
from jax.sharding import NamedSharding, PartitionSpec

from functrain.common import _tree
from functrain.common._checks import require, require_integer
from functrain.common._types import PyTree, Step
from functrain.engine import _placement
from functrain.inspect._fit_program import require_batch_shapes
from functrain.inspect._memory import memory
from functrain.targets._target import Target


def largest_batch(
    state: PyTree,
    step: Step[Any],
    batch: PyTree,
    *,
    multiple_of: int | None = None,
    fuse: int | None = None,
    target: Target | None = None,
    sharding: _placement.ShardingArg = None,
    donate: bool = False,
) -> int:
    """Returns the largest batch size whose `memory` fits into that of the device.

    Memory grows almost in proportion to the batch, so each size that is tried follows from those
    before it, until the answer is known to within a sixteenth or `multiple_of`. For each size a
    program is compiled, which takes seconds to minutes; three to ten sizes are tried. Nothing runs.

    Args:
      state: As for `memory`.
      step: As for `memory`.
      batch: A batch of any size to begin with. The first axis of all its leaves is the examples.
      multiple_of: Sizes that do not divide by this are not tried; by default 8 for each of the
        devices that share a batch.
      fuse: Steps per program; by default, what ``fuse="auto"`` would choose for each size.
      target: As for `memory`.
      sharding: As for `memory`.
      donate: As for `memory`.

    Returns:
      The number of examples; 0 if not even `multiple_of` fit.

    Raises:
      ValueError: The memory of the device is not known: pass a target; or `multiple_of` is not a
        multiple of the number of devices that share a batch.

    Examples:
      >>> import functrain as ft, jax, jax.numpy as jnp
      >>> def step(state, batch):
      ...     return state + jnp.mean(batch), {}
      >>> batch = jax.ShapeDtypeStruct((64, 1024), jnp.float32)
      >>> size = largest_batch(jnp.zeros(()), step, batch, target=ft.target())
      >>> size > 64, size % 8
      (True, 0)
    """
    require_batch_shapes(batch)
    shards = _shard_count(_placement.batch_sharding(sharding))
    multiple_of = 8 * shards if multiple_of is None else multiple_of
    require_integer("multiple_of", multiple_of)
    expected = f"a multiple of {shards}, the number of devices that share a batch"
    require(multiple_of % shards == 0, "multiple_of", expected, multiple_of)
    examples = {x.shape[0] for x in jax.tree.leaves(batch)}
    require(len(examples) == 1, "batch", "leaves with one first axis, the examples", batch)
    largest, too_large = 0, math.inf
    count: int = max(1, examples.pop() // multiple_of)
    totals: dict[int, int] = {}
    while True:
        shapes = _resize(batch, count * multiple_of)
        needed = memory(
            state, step, shapes, fuse=fuse, target=target, sharding=sharding, donate=donate
        )
        if needed.chip is None:
            raise ValueError(
                "target: expected the devices, such as functrain.target('tpu:v5e'), got None. How "
                "much memory a CPU may use is unknown; functrain.target() allows all of it."
            )
        # What a batch of no examples would need.
        totals[0] = needed.state + needed.original_state
        if totals[0] > needed.chip.memory_bytes:
            return 0
        # A compiler that refuses a program may not say what it would need.
        if needed.temporaries or not needed.is_refused:
            totals[count] = needed.total
        if needed.fits:
            largest = count
        else:
            too_large = count
        tolerance = max(1, largest // 16)
        if too_large - largest <= tolerance:
            return largest * multiple_of
        count = _next_count(totals, needed.chip.memory_bytes, largest, too_large, tolerance)


def _shard_count(sharding: NamedSharding | None) -> int:
    """Returns the number of parts that the examples of a batch are divided into."""
    if sharding is None:
        return 1
    examples = NamedSharding(sharding.mesh, PartitionSpec(*sharding.spec[:1]))
    return sharding.num_devices // examples.shard_shape((sharding.num_devices,))[0]


def _next_count(
    totals: dict[int, int], room: int, largest: int, too_large: float, tolerance: int
) -> int:
    """Returns the size to try next: where a line through two sizes reaches the room.

    Args:
      totals: The bytes of the sizes that were tried, and of none, as far as they are known.
      room: The bytes that there are.
      largest: The largest size that fits.
      too_large: The smallest size that does not fit.
      tolerance: The shortest step.
    """
    if too_large == math.inf:
        low, high = sorted(totals)[-2:]
    else:
        low, high = largest, int(too_large)
    # The TPU compiler computes values twice rather than exceed the memory. From there on the totals
    # stay below the room, and do not say how far it is to the first size that does not fit.
    is_full = sum(0.95 * room < total <= room for total in totals.values()) > 1
    if is_full or len(totals) > 6 or not {low, high} <= totals.keys():
        guess = (largest + min(too_large, 2 * largest or too_large)) / 2
    else:
        slope = max(1.0, (totals[high] - totals[low]) / (high - low))
        # A little less, since a size that fits is what is looked for.
        guess = 0.98 * (low + (room - totals[low]) / slope)
    # Sizes right below one that does not fit would say little.
    upper = largest * 16 if too_large == math.inf else too_large - (too_large - largest + 7) // 8
    return int(min(max(guess, largest + tolerance), upper))


def _resize(batch: PyTree, examples: int) -> PyTree:
    return jax.tree.map(
        lambda x: jax.ShapeDtypeStruct((examples, *x.shape[1:]), x.dtype), _tree.shapes(batch)
    )
