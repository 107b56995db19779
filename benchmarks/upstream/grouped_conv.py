"""[XLA:CPU] The gradient of the weights of grouped convolutions is very slow.

JAX writes it as a convolution with a `batch_group_count`. `fast` is one ordinary convolution for
each group. Expected: XLA is about as fast as that.

8 images of 8 x 8 pixels, 256 channels in 8 groups and a 3 x 3 kernel took 105 ms under jit and 55
ms in a loop, the eight convolutions 1.4 and 0.6 ms; 8 images of 28 x 28 pixels in 32 groups took
4560 and 201 ms, one convolution for each group 11 ms (2 cores, jax 0.10). On GPUs the gradient is
https://github.com/jax-ml/jax/issues/13800.
"""

import timeit
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

jax.config.update("jax_platforms", "cpu")

SHAPES = [(8, 8, 8, 256), (8, 8, 8, 256)]  # the image, and the gradient of the result


def conv(image: jax.Array, kernel: jax.Array, groups: int = 1) -> jax.Array:
    layouts, padding = ("NHWC", "HWIO", "NHWC"), ((1, 1), (1, 1))
    return lax.conv_general_dilated(
        image, kernel, (1, 1), padding, dimension_numbers=layouts, feature_group_count=groups
    )


def slow(image: jax.Array, grad: jax.Array) -> jax.Array:
    kernel = jax.ShapeDtypeStruct((3, 3, 32, 256), image.dtype)
    return jax.linear_transpose(lambda kernel: conv(image, kernel, groups=8), kernel)(grad)[0]


def fast(image: jax.Array, grad: jax.Array) -> jax.Array:
    # The batch is what is summed over, so it takes the place of the channels.
    images, grads = image.transpose(3, 1, 2, 0), grad.transpose(1, 2, 0, 3)
    groups = zip(jnp.split(images, 8, axis=0), jnp.split(grads, 8, axis=-1), strict=True)
    kernels = [conv(image, grad).transpose(1, 2, 0, 3) for image, grad in groups]
    return jnp.concatenate(kernels, axis=-1)


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
