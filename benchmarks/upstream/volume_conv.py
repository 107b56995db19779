"""[XLA:CPU] 3-D convolutions are slower than the same sum of 2-D convolutions.

Every tap along the kernel's first axis is a 2-D convolution of all planes of all volumes. `fast`
computes these and adds them up. Expected: a 3-D convolution is at least as fast.

8 volumes of 16 x 16 x 16 with 8 channels, a 3 x 3 x 3 kernel and 16 features took 34 ms under jit
and 65 ms in a loop, the 2-D convolutions 4.1 and 8.8 ms. The gradients of larger layers lose more:
that of the input of 4 volumes with 32 channels and 64 features, stride 2, took 860 instead of 9 ms
(2 cores, jax 0.10). The layouts are NDHWC and DHWIO, so this is not
https://github.com/jax-ml/jax/issues/12868.
"""

import timeit
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

jax.config.update("jax_platforms", "cpu")

SHAPES = [(8, 16, 16, 16, 8), (3, 3, 3, 8, 16)]  # the volumes and the kernel


def slow(volumes: jax.Array, kernel: jax.Array) -> jax.Array:
    layouts = ("NDHWC", "DHWIO", "NDHWC")
    return lax.conv_general_dilated(volumes, kernel, (1, 1, 1), "SAME", dimension_numbers=layouts)


def fast(volumes: jax.Array, kernel: jax.Array) -> jax.Array:
    padded = jnp.pad(volumes, ((0, 0), (1, 1), (0, 0), (0, 0), (0, 0)))
    layouts, total = ("NHWC", "HWIO", "NHWC"), jnp.zeros((8 * 16, 16, 16, 16))
    for tap in range(3):
        planes = padded[:, tap : tap + 16].reshape(8 * 16, 16, 16, 8)
        total += lax.conv_general_dilated(
            planes, kernel[tap], (1, 1), "SAME", dimension_numbers=layouts
        )
    return total.reshape(8, 16, 16, 16, 16)


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
