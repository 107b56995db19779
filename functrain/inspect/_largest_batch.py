"""The largest batch whose fit has room on a device."""

import math
from collections.abc import Callable
from typing import Any

import jax
from jax.sharding import NamedSharding, PartitionSpec

from functrain.common import _tree
from functrain.common._checks import require, require_integer
from functrain.common._repr import format_bytes
from functrain.common._types import PyTree, Step
from functrain.engine import _placement
from functrain.inspect._fit_program import require_batch_shapes
from functrain.inspect._memory import Memory, memory
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
    verbose: bool = True,
) -> int:
    """Returns the largest batch size whose `memory` fits into that of the device.

    Sizes are tried until the answer is known to within a sixteenth or `multiple_of`. For each size
    a program is compiled, which takes seconds to minutes; about ten sizes are tried. Nothing runs.

    Args:
      state: As for `memory`.
      step: As for `memory`.
      batch: A batch of any size to begin with. The first axis of all its leaves is the examples.
      multiple_of: Only multiples of this are tried; by default, 8 for each of the parts into which
        `sharding` divides the examples of a batch.
      fuse: Steps per program; by default, what ``fuse="auto"`` would choose for each size.
      target: As for `memory`.
      sharding: As for `memory`.
      donate: As for `memory`.
      verbose: Print a line for each size.

    Returns:
      The number of examples; 0 if not even `multiple_of` fit.

    Raises:
      ValueError: The memory of the device is not known: pass a target; `multiple_of` is not a
        positive multiple of the number of these parts; or leaves of the batch differ in their
        first axis. Otherwise as for `memory`.
      TypeError: As for `memory`.

    Examples:
      >>> import functrain as ft, jax, jax.numpy as jnp
      >>> def step(state, batch):
      ...     return state + jnp.mean(batch), {}
      >>> batch = jax.ShapeDtypeStruct((64, 1024), jnp.float32)
      >>> size = largest_batch(jnp.zeros(()), step, batch, target=ft.target(), verbose=False)
      >>> size > 64, size % 8
      (True, 0)
    """
    require_batch_shapes(batch)
    parts = _part_count(_placement.batch_sharding(sharding))
    multiple_of = 8 * parts if multiple_of is None else multiple_of
    require_integer("multiple_of", multiple_of)
    expected = f"a multiple of {parts}, the number of parts into which sharding divides a batch"
    require(multiple_of % parts == 0, "multiple_of", expected, multiple_of)
    sizes = {x.shape[0] for x in jax.tree.leaves(batch)}
    require(len(sizes) == 1, "batch", "leaves with one first axis, the examples", batch)
    first_count: int = max(1, sizes.pop() // multiple_of)

    def fits(count: int) -> bool | None:
        examples = count * multiple_of
        shapes = _resize(batch, examples)
        needed = memory(
            state, step, shapes, fuse=fuse, target=target, sharding=sharding, donate=donate
        )
        return _report_fit(needed, examples, verbose)

    return _largest_count(fits, first_count) * multiple_of


def _report_fit(needed: Memory, examples: int, verbose: bool) -> bool | None:
    """Returns True if a batch fits into the memory of the device; None if no batch ever does.

    Prints a line if `verbose`.

    Raises:
      ValueError: The memory of the device is not known.
    """
    if needed.chip is None:
        raise ValueError(
            "target: expected the devices, such as functrain.target('tpu:v5e'), got None. How "
            "much memory a CPU may use is unknown; functrain.target() allows all of it."
        )
    if verbose:
        verdict = "fits" if needed.fits else "does not fit"
        print(f"{examples:,} examples: {format_bytes(needed.total)}, {verdict}", flush=True)
    # No batch fits beside a state that takes all of the memory.
    if needed.state + needed.original_state > needed.chip.memory_bytes:
        return None
    return needed.fits


def _largest_count(fits: Callable[[int], bool | None], count: int) -> int:
    """Returns the largest number for which `fits` is True, within a sixteenth; 0 if there is none.

    Args:
      fits: Returns None if no number fits.
      count: The number to begin at.
    """
    largest, too_large = 0, 0  # numbers that fit and do not fit; 0 as long as there is none
    while True:
        count_fits = fits(count)
        if count_fits is None:
            return 0
        if count_fits:
            largest = count
        else:
            too_large = count
        if not too_large:
            count *= 4
        elif not largest and count > 1:
            count = max(1, count // 4)
        elif too_large - largest <= max(1, largest // 16):
            return largest
        else:
            count = max(largest + 1, math.isqrt(largest * too_large))


def _part_count(sharding: NamedSharding | None) -> int:
    """Returns the number of parts that the examples of a batch are divided into.

    Several devices hold the same part if the mesh has axes that do not divide the examples.
    """
    if sharding is None:
        return 1
    examples = NamedSharding(sharding.mesh, PartitionSpec(*sharding.spec[:1]))
    return sharding.num_devices // examples.shard_shape((sharding.num_devices,))[0]


def _resize(batch: PyTree, examples: int) -> PyTree:
    """Returns the shapes of a batch of another size."""
    return jax.tree.map(
        lambda x: jax.ShapeDtypeStruct((examples, *x.shape[1:]), x.dtype), _tree.shapes(batch)
    )
