"""Learning rates and the like, one a member: leaves of the state."""

from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from functrain.common import _patterns, _tree
from functrain.common._checks import require, require_no_problems
from functrain.population._state import PopulationState, require_population

_INJECTED = "hyperparams"  # where optax.inject_hyperparams keeps them


def hyperparameters(population: PopulationState) -> dict[str, np.ndarray]:
    """Returns what `optax.inject_hyperparams` has made parts of the state, `[N]` each.

    Args:
      population: The population.

    Returns:
      By name, such as ``learning_rate``; where two optimizers have one of that name, by path.

    Examples:
      >>> import functrain as ft, jax.numpy as jnp, optax
      >>> tx = optax.inject_hyperparams(optax.sgd)(learning_rate=0.5)
      >>> state = ft.TrainState.create(params={"w": jnp.zeros(3)}, tx=tx)
      >>> print(hyperparameters(ft.population.stack([state, state])))
      {'learning_rate': array([0.5, 0.5], dtype=float32)}
    """
    require_population(population, "population")
    leaves = [(p, x) for p, x in _tree.leaves_with_path(population.states) if _is_injected(p)]
    times = Counter(_name(path) for path, _ in leaves)
    return {_name(p) if times[_name(p)] == 1 else p: np.asarray(x) for p, x in leaves}


def with_hyperparameters(population: PopulationState, values: Mapping[str, Any]) -> PopulationState:
    """Returns the population with other hyperparameters, one a member.

    Args:
      population: The population.
      values: Arrays `[N]`, or `[N, ...]` for leaves that are no scalars, by name: of what
        `optax.inject_hyperparams` has made part of the state, such as ``learning_rate``; or by a
        pattern over paths in a member's state, such as ``model_state/loss_weight`` or
        ``**/hyperparams/learning_rate``.

    Returns:
      The population; the leaves keep their dtypes.

    Raises:
      ValueError: A name has no place in the state (those there are are listed), or several, or
        belongs to a schedule; or the values are not one a member.

    Examples:
      >>> import functrain as ft, jax.numpy as jnp, optax
      >>> tx = optax.inject_hyperparams(optax.sgd)(learning_rate=0.5)
      >>> state = ft.TrainState.create(params={"w": jnp.zeros(3)}, tx=tx)
      >>> population = ft.population.stack([state, state])
      >>> population = with_hyperparameters(population, {"learning_rate": [0.1, 0.2]})
      >>> print(hyperparameters(population)["learning_rate"])
      [0.1 0.2]
    """
    require_population(population, "population")
    leaves = dict(_tree.leaves_with_path(population.states))
    for name, paths in places(population, values).items():
        for path in paths:
            leaves[path] = _fitting(name, values[name], leaves[path])
    structure = jax.tree.structure(population.states)
    return population.replace(states=jax.tree.unflatten(structure, leaves.values()))


def places(population: PopulationState, names: Iterable[str]) -> dict[str, list[str]]:
    """Returns the paths of the leaves that each name means; see `with_hyperparameters`."""
    paths = [path for path, _ in _tree.leaves_with_path(population.states)]
    return {name: _places(name, paths) for name in names}


def _places(name: str, paths: list[str]) -> list[str]:
    if "/" in name:
        found = [path for path in paths if _patterns.matches(name, path)]
    else:
        found = [path for path in paths if _is_injected(path) and _name(path) == name]
        found = found or [path for path in paths if path == name]
        several = found if len(found) > 1 else []
        advice = f"Name it by its path, or all of them by a pattern: '**/{_INJECTED}/{name}'."
        expected = f"one place in the state for {name!r}"
        require_no_problems("hyperparameters", several, expected, advice)
    if not found:
        injected = ", ".join(_name(p) for p in paths if _is_injected(p)) or "none"
        near = _patterns.closest_patterns(name, paths) if "/" in name else paths[:3]
        raise ValueError(
            f"hyperparameters: expected a name that has a place in the state, got {name!r}. "
            f"Injected there are {injected}: optax.inject_hyperparams(optax.adam)("
            "learning_rate=1e-3) injects one. Other leaves are named by their path, such as "
            f"{', '.join(near)}."
        )
    for path in found:
        _refuse_scheduled(path, paths)
    return found


def _refuse_scheduled(path: str, paths: list[str]) -> None:
    """Refuses what a schedule overwrites at the next step."""
    if not _is_injected(path):
        return
    before = path.split("/")[:-2]
    schedule = "/".join([*before, f"{_INJECTED}_states", _name(path)])
    if any(other.startswith(f"{schedule}/") for other in paths):
        raise ValueError(
            f"hyperparameters: expected a number at {path}, got a schedule, which would overwrite "
            "it at the next step. Inject a factor instead, as in optax.chain(optax.adam(schedule), "
            "optax.inject_hyperparams(optax.scale)(step_size=1.0))."
        )


def _fitting(name: str, values: Any, leaf: jax.Array) -> jax.Array:
    got = jnp.asarray(values)
    is_number = jnp.issubdtype(leaf.dtype, jnp.inexact) or got.dtype == leaf.dtype
    is_fitting = got.shape == leaf.shape and is_number
    expected = f"one a member, {_tree.strong_spec(leaf)}"
    require(is_fitting, f"hyperparameters[{name!r}]", expected, got)
    # Beside the leaf it replaces: a population may lie on several devices.
    return _tree.device_put_like(got.astype(leaf.dtype), leaf)


def _is_injected(path: str) -> bool:
    return path.split("/")[-2:-1] == [_INJECTED]


def _name(path: str) -> str:
    return path.split("/")[-1]
