"""[XLA:CPU] A batched product transposes its larger operand; with swapped operands it is faster.

In the gradient of attention's keys, the gradient of the scores `[B, N, T, S]` is contracted over T
with the queries `[B, N, T, H]`. The kernel for batched products needs the contracted axis last on
the left side, so XLA transposes the scores. `fast` has the queries, which are smaller, on the
left, and transposes the result. The barrier keeps XLA from swapping the product back. Expected:
XLA transposes the smaller operand.

The shapes below took 77 ms and 39 ms in a loop on 2 cores with jax 0.10.

https://github.com/jax-ml/jax/issues/19327 is related: there, too, the time depends on the order of
the operands, probably on CPU only, but the product has no batch axes.
"""

import timeit
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

jax.config.update("jax_platforms", "cpu")

SHAPES = [(2, 8, 512, 512), (2, 8, 512, 64)]  # the gradient of the scores, and the queries


def slow(scores: jax.Array, queries: jax.Array) -> jax.Array:
    return lax.dot_general(scores, queries, (((2,), (2,)), ((0, 1), (0, 1))))


def fast(scores: jax.Array, queries: jax.Array) -> jax.Array:
    out = lax.dot_general(queries, scores, (((2,), (2,)), ((0, 1), (0, 1))))
    return lax.transpose(lax.optimization_barrier(out), (0, 1, 3, 2))


def milliseconds(fn: Any, operands: list[jax.Array], rounds: int) -> float:
    """Returns the time of a call, in a loop in which every operand depends on the last result."""

    def step(_: Any, carry: Any) -> Any:
        operands, out = carry
        operands = [x.at[(0,) * x.ndim].add(1e-30 * out.ravel()[0]) for x in operands]
        return operands, fn(*operands)

    loop = jax.jit(lambda n, carry: lax.fori_loop(0, n, step, carry))
    carry = operands, jax.jit(fn)(*operands)
    # The first run compiles, so it is never the fastest.
    runs = timeit.repeat(lambda: jax.block_until_ready(loop(rounds, carry)), number=1, repeat=4)
    return 1e3 * min(runs) / rounds


rng = np.random.default_rng(0)
operands = [jnp.asarray(rng.standard_normal(shape), jnp.float32) for shape in SHAPES]
np.testing.assert_allclose(jax.jit(fast)(*operands), jax.jit(slow)(*operands), rtol=1e-3, atol=1e-2)
slow_ms, fast_ms = (milliseconds(fn, operands, rounds=10) for fn in (slow, fast))
print(f"jax {jax.__version__}: {slow_ms:.3g} ms -> {fast_ms:.3g} ms, {slow_ms / fast_ms:.1f} times")
