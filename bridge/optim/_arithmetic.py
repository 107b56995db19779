"""Updates that hit the params they are meant to lead to."""

import jax
import jax.numpy as jnp


def difference(new: jax.Array, old: jax.Array) -> jax.Array:
    """Returns what `optax.apply_updates` adds to `old` to get `new`, as far as it can.

    The plain difference misses `new` by a rounding whenever its exponent is above that of both.
    Adding what is missing hits it, unless no float does: where a parameter changes its sign or
    shrinks by more than half, ``old + update`` has no bits finer than those of `old`.
    """
    update = new - old
    missing = new - (old + update)
    return update + jnp.where(jnp.isfinite(missing), missing, jnp.zeros_like(missing))
