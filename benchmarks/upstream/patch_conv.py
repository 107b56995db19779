"""[XLA:CPU] Convolutions with more taps than the image has pixels are very slow.

Such images are at the end of every deep network. XLA computes these convolutions in a naive
kernel. `fast` multiplies the patches that the taps see (im2col) by the kernel in one matrix
product. Expected: a convolution is about as fast as that product.

64 images of 2 x 2 pixels, 128 channels, a 3 x 3 kernel and 128 features took 9.5 ms, the product
0.57 ms. The gradient of the input of a VALID 3 x 3 convolution of 64 images of 4 x 4 pixels with
256 channels and features, whose kernel is larger than its 2 x 2 image, took 157 ms instead of 2.5
ms (in a loop, 2 cores of an AMD EPYC, jax 0.12). The layouts are NHWC and HWIO, so this is not
https://github.com/jax-ml/jax/issues/12868.
"""

import timeit
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

jax.config.update("jax_platforms", "cpu")

SHAPES = [(64, 2, 2, 128), (3, 3, 128, 128)]  # the images and the kernel


def slow(images: jax.Array, kernel: jax.Array) -> jax.Array:
    layouts = ("NHWC", "HWIO", "NHWC")
    return lax.conv_general_dilated(images, kernel, (1, 1), "SAME", dimension_numbers=layouts)


def fast(images: jax.Array, kernel: jax.Array) -> jax.Array:
    padded = jnp.pad(images, ((0, 0), (1, 1), (1, 1), (0, 0)))
    patches = [padded[:, i : i + 2, j : j + 2] for i in range(3) for j in range(3)]
    return jnp.concatenate(patches, axis=-1) @ kernel.reshape(9 * 128, 128)


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
