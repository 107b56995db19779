"""[XLA:CPU] Convolutions multiply taps that see nothing but padding.

At the end of a deep network, a 3 x 3 kernel with padding SAME may meet a 1 x 1 image. Eight of its
nine taps see only padding, but XLA computes with all of them. `fast` uses the tap that sees the
image: one matrix product. Expected: XLA crops the kernel to the taps that can see the image.

The forward pass below took 6.6 ms under jit and 27 ms in a loop, the matrix product 0.12 and 11 ms
(2 cores, jax 0.10). The layouts are NHWC and HWIO, so this is not
https://github.com/jax-ml/jax/issues/12868.
"""

import timeit
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

jax.config.update("jax_platforms", "cpu")

SHAPES = [(16, 1, 1, 512), (3, 3, 512, 512)]  # the image and the kernel


def slow(image: jax.Array, kernel: jax.Array) -> jax.Array:
    layouts = ("NHWC", "HWIO", "NHWC")
    return lax.conv_general_dilated(image, kernel, (1, 1), "SAME", dimension_numbers=layouts)


def fast(image: jax.Array, kernel: jax.Array) -> jax.Array:
    return image @ kernel[1, 1]


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
