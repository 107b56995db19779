"""[XLA:CPU] The gradient of maximum pooling is slow (`select_and_scatter`).

XLA visits the windows one by one. `fast` compares each tap of all windows with the maximum: the
first tap that equals it gets the gradient, as in `select_and_scatter`. Expected: XLA is as fast as
that, at least if the windows do not overlap.

32 images of 26 x 26 pixels and 32 channels, with windows of 2 x 2, took 5.0 ms under jit and 7.2
ms in a loop, the comparisons 0.14 and 0.54 ms (2 cores, jax 0.10). Windows that overlap lose as
much: 8 images of 58 x 58 pixels and 64 channels, 3 x 3 with stride 2, took 115 instead of 16 ms in
a loop.
"""

import timeit
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

jax.config.update("jax_platforms", "cpu")

SHAPES = [(32, 26, 26, 32), (32, 13, 13, 32)]  # the images, and the gradient of the result


def slow(images: jax.Array, grad: jax.Array) -> jax.Array:
    def pool(images: jax.Array) -> jax.Array:
        window = (1, 2, 2, 1)
        return lax.reduce_window(images, -jnp.inf, lax.max, window, window, "VALID")

    return jax.vjp(pool, images)[1](grad)[0]


def fast(images: jax.Array, grad: jax.Array) -> jax.Array:
    taps = [images[:, i::2, j::2] for i in range(2) for j in range(2)]
    highest = jnp.maximum(jnp.maximum(taps[0], taps[1]), jnp.maximum(taps[2], taps[3]))
    grads, is_open = [], jnp.ones(grad.shape, bool)
    for tap in taps:
        is_first = is_open & (tap == highest)
        grads.append(jnp.where(is_first, grad, 0))
        is_open &= ~is_first
    rows = [jnp.stack(grads[:2], axis=3), jnp.stack(grads[2:], axis=3)]
    return jnp.stack(rows, axis=2).reshape(images.shape)


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
