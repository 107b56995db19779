"""[XLA:CPU] A transpose that is folded into a product makes the product slower.

JAX writes the gradient of the weights of a dense layer `x @ w` as `(g^T x)^T`, contracted over
batch and time. XLA folds the last transpose into the product, and must then transpose one of the
long operands. `fast` is the same product with a barrier between product and transpose, so that
only the small result is transposed. Expected: both take equally long.

A layer from 256 to 64 features with 16 x 64 rows took 1.15 ms without and 0.64 ms with the
barrier, in a loop on 2 cores with jax 0.10.

https://github.com/jax-ml/jax/issues/19327 is related: there, too, the time depends on the order of
the operands, probably on CPU only.
"""

import timeit
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

jax.config.update("jax_platforms", "cpu")

SHAPES = [(16, 64, 256), (16, 64, 64)]  # x, and the gradient g of the result


def slow(x: jax.Array, g: jax.Array) -> jax.Array:
    return lax.dot_general(g, x, (((0, 1), (0, 1)), ((), ()))).T


def fast(x: jax.Array, g: jax.Array) -> jax.Array:
    x, g = x.reshape(-1, x.shape[-1]), g.reshape(-1, g.shape[-1])
    return lax.optimization_barrier(lax.dot_general(g, x, (((0,), (0,)), ((), ())))).T


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
slow_ms, fast_ms = (milliseconds(fn, operands, rounds=200) for fn in (slow, fast))
print(f"jax {jax.__version__}: {slow_ms:.3g} ms -> {fast_ms:.3g} ms, {slow_ms / fast_ms:.1f} times")
