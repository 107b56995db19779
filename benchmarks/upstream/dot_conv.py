"""[XLA:CPU] Convolutions with one tap or one position are slower than the matrix product they are.

The gradient of the weights of a 1 x 1 convolution has one position: its window is the whole image.
`fast` is the same arithmetic as a matrix product. Expected: XLA turns such a convolution into a
dot.

8 images of 56 x 56 pixels, 64 channels and 256 features took 84 ms in a loop, the matrix product
11 ms (2 cores, jax 0.10). The layouts are NHWC and HWIO, so this is not
https://github.com/jax-ml/jax/issues/12868.
"""

import timeit
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

jax.config.update("jax_platforms", "cpu")

SHAPES = [(8, 56, 56, 64), (8, 56, 56, 256)]  # the image, and the gradient of the result


def slow(image: jax.Array, grad: jax.Array) -> jax.Array:
    # The batch is what is summed over, so it takes the place of the channels.
    images, grads = image.transpose(3, 1, 2, 0), grad.transpose(1, 2, 0, 3)
    layouts = ("NHWC", "HWIO", "NHWC")
    out = lax.conv_general_dilated(images, grads, (1, 1), "VALID", dimension_numbers=layouts)
    return out.reshape(64, 256)


def fast(image: jax.Array, grad: jax.Array) -> jax.Array:
    return image.reshape(-1, 64).T @ grad.reshape(-1, 256)


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
slow_ms, fast_ms = (milliseconds(fn, operands, rounds=5) for fn in (slow, fast))
print(f"jax {jax.__version__}: {slow_ms:.3g} ms -> {fast_ms:.3g} ms, {slow_ms / fast_ms:.1f} times")
