"""[XLA:CPU] Maximum pooling is slower than a maximum of strided slices.

`fast` takes the maximum of nine strided slices of the image, one for each tap of the window.
Expected: `reduce_window` is at least as fast.

8 images of 58 x 58 pixels and 64 channels, with a window of 3 x 3 and stride 2, took 2.0 ms under
jit and 2.9 ms in a loop, the slices 0.24 and 1.3 ms (2 cores, jax 0.10).
"""

import timeit
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

jax.config.update("jax_platforms", "cpu")

SHAPES = [(8, 58, 58, 64)]


def slow(images: jax.Array) -> jax.Array:
    window, strides = (1, 3, 3, 1), (1, 2, 2, 1)
    return lax.reduce_window(images, -jnp.inf, lax.max, window, strides, "VALID")


def fast(images: jax.Array) -> jax.Array:
    out = images[:, 0:55:2, 0:55:2]
    for i in range(3):
        for j in range(3):
            out = jnp.maximum(out, images[:, i : i + 55 : 2, j : j + 55 : 2])
    return out


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
slow_ms, fast_ms = (milliseconds(fn, operands, rounds=20) for fn in (slow, fast))
print(f"jax {jax.__version__}: {slow_ms:.3g} ms -> {fast_ms:.3g} ms, {slow_ms / fast_ms:.1f} times")
