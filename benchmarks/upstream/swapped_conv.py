"""[XLA:CPU] The gradient of the weights of transposed convolutions multiplies holes.

It is a convolution of an image with holes (`lhs_dilation`) by a kernel that is larger than the
result. Image and kernel may change places if the result is reversed; then the holes are in the
kernel, and XLA skips them. `fast` does that. Expected: XLA is as fast for holes in the image.

16 images of 16 x 16 pixels and 64 channels, a 4 x 4 kernel, stride 2 and 32 features took 380 ms
in a loop, and 7.5 ms with both swapped (2 cores, jax 0.10). The layouts are NHWC and HWIO, so this
is not https://github.com/jax-ml/jax/issues/12868.

https://github.com/jax-ml/jax/issues/31662 (https://github.com/openxla/xla/issues/34273) reports
the same gradient in 3-D on a GPU.
"""

import timeit
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

jax.config.update("jax_platforms", "cpu")

SHAPES = [(16, 16, 16, 64), (16, 32, 32, 32)]  # the layer's image, the gradient of its result
LAYOUTS = ("NHWC", "HWIO", "NHWC")


def slow(image: jax.Array, grad: jax.Array) -> jax.Array:
    # The batch is what is summed over, so it takes the place of the channels.
    out = lax.conv_general_dilated(
        image.transpose(3, 1, 2, 0),
        grad.transpose(1, 2, 0, 3),
        window_strides=(1, 1),
        padding=((2, 2), (2, 2)),
        lhs_dilation=(2, 2),
        dimension_numbers=LAYOUTS,
    )
    return out.transpose(1, 2, 0, 3)


def fast(image: jax.Array, grad: jax.Array) -> jax.Array:
    out = lax.conv_general_dilated(
        grad.transpose(3, 1, 2, 0),
        image.transpose(1, 2, 0, 3),
        window_strides=(1, 1),
        padding=((1, 1), (1, 1)),
        rhs_dilation=(2, 2),
        dimension_numbers=LAYOUTS,
    )
    return out[:, ::-1, ::-1].transpose(1, 2, 3, 0)


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
slow_ms, fast_ms = (milliseconds(fn, operands, rounds=3) for fn in (slow, fast))
print(f"jax {jax.__version__}: {slow_ms:.3g} ms -> {fast_ms:.3g} ms, {slow_ms / fast_ms:.1f} times")
