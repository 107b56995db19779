"""Takes the steps of a chunk with some members, then with the next ones, to stay on the chip.

The compiler of a TPU keeps the state of a loop in the memory on the chip, 128 MiB of a v5e, if it
fits. If it does not, every step reads and writes a part of the state in the slower memory beside
the chip. Members do not depend on each other, so a block of them can take all K steps before the
next block takes its first: each block then stays on the chip for K steps.

Cycles of a step of all members, as the compilers of jax 0.10 estimate them for K = 32, MLPs with
Adam and batches of 32, without and with blocks:

    layers         members  state    chip  blocks  cycles
    784 64 64 10   256      161 MiB  v5e   2       818,897 -> 330,399
    784 64 64 10   384      242 MiB  v5e   3       1,125,127 -> 512,425
    784 64 64 10   200      126 MiB  v5e   2       603,762 -> 336,906
    784 64 64 10   160      101 MiB  v5e   2       320,725 -> 289,767
    64 32 10       4096     113 MiB  v5e   2       2,340,533 -> 1,521,079
    784 64 64 10   256      161 MiB  v6e   2       419,464 -> 323,062
    784 64 64 10   256      161 MiB  v5p   2       591,152 -> 690,106  (keeps no state on the chip)
    64 32 10       1024     28 MiB   v5e   2       325,044 -> 353,188  (fits without blocks)

A state that fits is copied onto the chip before the loop, if it has large leaves:

    784 64 64 10   32       20 MiB   v5e           146,126 -> 71,500
    784 64 64 10   64       40 MiB   v5e           171,104 -> 92,388
    784 64 64 10   32       20 MiB   v6e           77,201 -> 63,999
    784 64 64 10   100      63 MiB   v5e           152,925 -> 159,003  (was copied anyway)
"""

import math
from collections.abc import Callable
from typing import TypeAlias

import jax
import jax.numpy as jnp
from jax import lax

from functrain.common._types import PyTree
from functrain.engine._plan import nbytes

Run: TypeAlias = Callable[[PyTree, PyTree], tuple[PyTree, PyTree]]

# The part of the memory on the chip that a state may take. The compiler needs room for activations
# and pads arrays: 128 members of the first row, 81 MiB, stay on a v5e, 160 members do not.
STATE_PART = 2 / 3
# The compiler copies smaller leaves by itself: those of 16 members of the first row, 3 MiB, but
# not those of 32, 6 MiB.
MIN_COPIED_BYTES = 5 * 2**20


def count_blocks(carry: PyTree, on_chip_bytes: int) -> int:
    """Returns the fewest blocks of equal size that stay on the chip; 1 if there are none.

    Args:
      carry: Leaves `[N, ...]`.
      on_chip_bytes: The memory on the chip.

    Examples:
      >>> count_blocks(jnp.zeros((6, 100)), on_chip_bytes=1800)
      2
      >>> count_blocks(jnp.zeros((7, 100)), on_chip_bytes=1800)
      1
    """
    members = len(jax.tree.leaves(carry)[0])
    least = nbytes(carry) / (STATE_PART * on_chip_bytes)
    # Blocks much smaller than those that would fit cost more than they save: each of their steps
    # takes the least time of its kernels.
    for blocks in range(math.ceil(least), min(members, int(2 * least)) + 1):
        if members % blocks == 0:
            return blocks
    return 1


def copy_onto_chip(carry: PyTree, n: jax.Array, on_chip_bytes: int) -> PyTree:
    """Copies the large leaves of a state that fits, so that the loop finds them on the chip.

    A donated leaf stays where it is, unless the compiler thinks that it can hide the time of the
    copy behind other work before the loop.

    Args:
      carry: Leaves `[N, ...]`.
      n: i32[], a number that is not negative. The compiler does not know that.
      on_chip_bytes: The memory on the chip.
    """
    if nbytes(carry) > STATE_PART * on_chip_bytes:
        return carry

    def copy(x: jax.Array) -> jax.Array:
        # A select of all elements: the compiler removes any copy that it recognizes as one.
        return x if nbytes(x) < MIN_COPIED_BYTES else lax.select(n >= 0, x, jnp.zeros_like(x))

    return jax.tree.map(copy, carry)


def run_blocks(
    run: Run, carry: PyTree, chunk: PyTree, blocks: int, axis: int | None
) -> tuple[PyTree, PyTree]:
    """Runs a chunk with one block of members after another.

    Args:
      run: ``(carry, chunk) -> (carry, rows)``, with rows `[K, members, ...]`.
      carry: Leaves `[N, ...]`.
      chunk: The batches.
      blocks: The number of blocks, a divisor of N.
      axis: The axis of the members in the chunk; None if all of them get the same batches.

    Returns:
      The carry, and the rows `[K, N, ...]`.
    """
    members = len(jax.tree.leaves(carry)[0])
    size = members // blocks

    def take(tree: PyTree, start: jax.Array, axis: int) -> PyTree:
        return jax.tree.map(lambda x: lax.dynamic_slice_in_dim(x, start, size, axis), tree)

    def run_block(carry: PyTree, start: jax.Array) -> tuple[PyTree, PyTree]:
        batches = chunk if axis is None else take(chunk, start, axis)
        block, rows = run(take(carry, start, 0), batches)
        # Written into the carry, so that the program needs no second one.
        carry = jax.tree.map(
            lambda x, new: lax.dynamic_update_slice_in_dim(x, new, start, 0), carry, block
        )
        return carry, rows

    carry, rows = lax.scan(run_block, carry, jnp.arange(0, members, size))  # rows [blocks, K, ...]
    rows = jax.tree.map(lambda x: jnp.concatenate(list(x), axis=1), rows)
    return carry, rows
