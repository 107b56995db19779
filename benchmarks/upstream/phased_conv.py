"""[XLA:CPU] Transposed convolutions multiply the holes of the image.

A transposed convolution with stride 2 is a convolution of an image with holes (`lhs_dilation`).
Every second position of the result sees the same taps, so the result is made of four ordinary
convolutions of the image without holes, each with a quarter of the kernel. `fast` computes and
interleaves these. Expected: XLA multiplies no holes.

8 images of 28 x 28 pixels and 64 channels, a 4 x 4 kernel and 128 features took 46 ms, the four
convolutions 12 ms (in a loop, 2 cores of an AMD EPYC, jax 0.12). The layouts are NHWC and HWIO, so
this is not https://github.com/jax-ml/jax/issues/12868.

It is meant as a comment on https://github.com/jax-ml/jax/issues/23783.
"""

import timeit
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

jax.config.update("jax_platforms", "cpu")

SHAPES = [(8, 28, 28, 64), (4, 4, 64, 128)]  # the images and the kernel


def conv(images: jax.Array, kernel: jax.Array, padding: Any, dilation: int = 1) -> jax.Array:
    return lax.conv_general_dilated(
        images,
        kernel,
        window_strides=(1, 1),
        padding=padding,
        lhs_dilation=(dilation, dilation),
        dimension_numbers=("NHWC", "HWIO", "NHWC"),
    )


def slow(images: jax.Array, kernel: jax.Array) -> jax.Array:
    return conv(images, kernel, ((2, 2), (2, 2)), dilation=2)


def fast(images: jax.Array, kernel: jax.Array) -> jax.Array:
    pads = ((1, 0), (0, 1))
    columns = [
        [conv(images, kernel[i::2, j::2], (pads[i], pads[j])) for j in range(2)] for i in range(2)
    ]
    rows = [jnp.stack(column, axis=3) for column in columns]
    return jnp.stack(rows, axis=2).reshape(8, 56, 56, 128)


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
