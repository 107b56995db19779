"""The rate at which a step trained, for the logs."""

import itertools
from collections import Counter

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
    rates = [(_name(path), x) for path, x in _named("learning_rate", new.opt_state)]
    times = Counter(name for name, _ in rates)
    return {name: jnp.asarray(x, jnp.float32) for name, x in rates if times[name] == 1}


def _name(path: list[str]) -> str:
    """Calls a rate after the groups it is in: optax.partition keeps their states by name."""
    groups = [b for a, b in itertools.pairwise(path) if a == "inner_states"]
    return "/".join([*groups, "learning_rate"])


def _count(state: TrainState) -> jax.Array:
    """The number that a schedule inside the optimizer is asked with."""
    found = [x.count for x in _tree.nodes(state.opt_state, optax.ScaleByScheduleState)]
    found = found or [x for _, x in _named("gradient_step", state.opt_state)]  # MultiSteps'
    return found[0] if found else state.step


def _named(name: str, tree: PyTree) -> list[tuple[list[str], jax.Array]]:
    found = [(path.split("/"), x) for path, x in _tree.leaves_with_path(tree)]
    return [(path, x) for path, x in found if path[-1] == name]
