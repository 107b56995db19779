"""The rate at which a step trained, for the logs."""

import jax
import jax.numpy as jnp
import optax

from functrain.common import _tree
from functrain.common._types import PyTree
from functrain.step._state import TrainState


def applied_rate(
    old: TrainState, new: TrainState, schedule: optax.Schedule | None
) -> dict[str, jax.Array]:
    """Returns the rate of the update between two states as a log, nothing where it is unknown."""
    if schedule is not None:
        return {"learning_rate": jnp.asarray(schedule(_count(old)), jnp.float32)}
    # inject_hyperparams writes down, with an update, the values it was made with.
    injected = _named("learning_rate", new.opt_state)
    return {"learning_rate": jnp.asarray(injected[0], jnp.float32)} if len(injected) == 1 else {}


def _count(state: TrainState) -> jax.Array:
    """The number that a schedule inside the optimizer is asked with."""
    found = [x.count for x in _tree.nodes(state.opt_state, optax.ScaleByScheduleState)]
    found = found if len(found) == 1 else _named("gradient_step", state.opt_state)  # MultiSteps'
    return found[0] if len(found) == 1 else state.step


def _named(name: str, tree: PyTree) -> list[jax.Array]:
    return [x for path, x in _tree.leaves_with_path(tree) if path.split("/")[-1] == name]
