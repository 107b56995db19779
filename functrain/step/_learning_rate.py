"""The rate at which a step trained, for the logs."""

import jax
import jax.numpy as jnp
import optax

from functrain.step._state import TrainState


def learning_rate_of(state: TrainState, schedule: optax.Schedule | None) -> dict[str, jax.Array]:
    """Returns the rate as a log, nothing where it is not known."""
    if schedule is not None:
        return {"learning_rate": jnp.asarray(schedule(state.step), jnp.float32)}
    found = optax.tree.get_all_with_path(state.opt_state, "learning_rate")
    if len(found) == 1:
        return {"learning_rate": jnp.asarray(found[0][1], jnp.float32)}
    return {}
