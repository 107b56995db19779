"""Labels in the shape of the outputs they are compared with."""

import jax
import jax.numpy as jnp


def like(y: jax.Array, outputs: jax.Array) -> jax.Array:
    """Gives labels the shape of outputs that differ from them by axes of length one."""
    y = jnp.asarray(y)
    if y.size != outputs.size or y.shape[:1] != outputs.shape[:1]:
        raise ValueError(f"labels: expected the shape of outputs {outputs.shape}, got {y.shape}")
    return y.reshape(outputs.shape)
