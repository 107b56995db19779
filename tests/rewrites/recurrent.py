"""Recurrent layers, with and without masks, for the tests of the rewrites of scans."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from . import cases

UNITS = 8


def lstm(p: Any, carry: Any, x: Any) -> Any:
    h, c = carry
    i, f, g, o = jnp.split(x @ p["in"] + h @ p["own"] + p["bias"], 4, axis=-1)
    c = jax.nn.sigmoid(f) * c + jax.nn.sigmoid(i) * jnp.tanh(g)
    return jax.nn.sigmoid(o) * jnp.tanh(c), c


def gru(p: Any, carry: Any, x: Any) -> Any:
    h, _ = carry
    (xz, xr, xg), (hz, hr, hg) = (
        jnp.split(part[:, : 3 * UNITS], 3, axis=-1)
        for part in (x @ p["in"] + p["bias"], h @ p["own"])
    )
    z = jax.nn.sigmoid(xz + hz)
    h = z * h + (1 - z) * jnp.tanh(xg + jax.nn.sigmoid(xr + hr) * hg)
    return h, jnp.zeros_like(h)


def layer(
    cell: Callable[..., Any], reverse: bool = False, masked: bool = False
) -> Callable[..., Any]:
    """Returns a function of weights and inputs: the loss, outputs, last state and gradients."""

    def loss(p: Any, xs: Any) -> Any:
        mask = xs[..., :1] > -0.5

        def body(carry: Any, x: Any) -> Any:
            x, keep = x
            new = cell(p, carry, x)
            if masked:
                new = jax.tree.map(lambda new, old: jnp.where(keep, new, old), new, carry)
            return new, new[0]

        start = 2 * (jnp.zeros((xs.shape[1], UNITS), xs.dtype),)
        last, hs = lax.scan(body, start, (xs, mask), reverse=reverse)
        return jnp.sum(last[0] ** 2) + jnp.mean(hs), (hs, last)

    return jax.value_and_grad(loss, argnums=(0, 1), has_aux=True)


SIZES = {"in": (3, 4 * UNITS), "own": (UNITS, 4 * UNITS), "bias": (4 * UNITS,)}


def flat(fn: Callable[..., Any]) -> Callable[..., Any]:
    """Returns the function with the weights as separate arguments, as `check_accuracy` wants it."""
    return lambda xs, *p: fn(dict(zip(SIZES, p, strict=True)), xs)


def numbers(steps: int = 4) -> list[jax.Array]:
    """Returns inputs `[T, B, 3]` and the weights."""
    rng = np.random.default_rng(0)
    weights = [cases.normal(rng, size) / 2 for size in SIZES.values()]
    return [cases.normal(rng, (steps, 4, 3)), *weights]


MODELS = {
    "lstm": flat(layer(lstm)),
    "gru": flat(layer(gru)),
    "reverse": flat(layer(lstm, reverse=True)),
    "masked": flat(layer(lstm, masked=True)),
    "masked and reverse": flat(layer(gru, reverse=True, masked=True)),
    "both directions": lambda *args: [
        flat(layer(lstm, reverse))(*args) for reverse in (False, True)
    ],
}
