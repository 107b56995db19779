"""[XLA:CPU] The gradient of the weights of depthwise convolutions is very slow.

JAX writes it as a convolution with a `batch_group_count`, whose window is the whole image. `fast`
is the same sum, written as one product and one reduction for each of the nine taps. Expected: XLA
is about as fast as that.

8 images of 16 x 16 pixels and 96 channels took 2.9 ms under jit and 168 ms in a loop, the sums 0.3
and 0.4 ms; 8 images of 56 x 56 pixels took 7200 and 1870 ms, the sums 8.0 and 6.2 ms (2 cores, jax
0.10). The forward pass is slow, too: https://github.com/jax-ml/jax/issues/23713. On GPUs the
gradient is https://github.com/jax-ml/jax/issues/13800.
"""

import timeit
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

jax.config.update("jax_platforms", "cpu")

SHAPES = [(8, 16, 16, 96), (8, 16, 16, 96)]  # the image, and the gradient of the result


def slow(image: jax.Array, grad: jax.Array) -> jax.Array:
    def layer(kernel: jax.Array) -> jax.Array:
        return lax.conv_general_dilated(
            image,
            kernel,
            window_strides=(1, 1),
            padding="SAME",
            dimension_numbers=("NHWC", "HWIO", "NHWC"),
            feature_group_count=96,
        )

    return jax.linear_transpose(layer, jax.ShapeDtypeStruct((3, 3, 1, 96), image.dtype))(grad)[0]


def fast(image: jax.Array, grad: jax.Array) -> jax.Array:
    padded = jnp.pad(image, ((0, 0), (1, 1), (1, 1), (0, 0)))
    shifts = [padded[:, i : i + 16, j : j + 16] for i in range(3) for j in range(3)]
    sums = [jnp.sum(shift * grad, axis=(0, 1, 2)) for shift in shifts]
    return jnp.stack(sums).reshape(3, 3, 1, 96)


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
