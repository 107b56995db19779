"""Hyperparameters with one value for each member, stored as leaves of the state."""

from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from functrain.common import _patterns, _tree
from functrain.common._checks import require, require_no_problems
from functrain.hooks._reduce_lr_on_plateau import is_scheduled
from functrain.population._state import PopulationState, require_population

# The attribute of optax.inject_hyperparams' state that holds the hyperparameters.
_INJECTED = "hyperparams"


def hyperparameters(population: PopulationState) -> dict[str, np.ndarray]:
    """Returns the hyperparameters that `optax.inject_hyperparams` keeps in the state.

    Args:
      population: The population.

    Returns:
      Arrays `[N]` by name, such as ``learning_rate``. If two optimizers have a hyperparameter of
      that name, both are given by their paths.

    Raises:
      TypeError: `population` is not a `PopulationState`.

    Examples:
      >>> import functrain as ft, jax.numpy as jnp, optax
      >>> tx = optax.inject_hyperparams(optax.sgd)(learning_rate=0.5)
      >>> state = ft.TrainState.create(params={"w": jnp.zeros(3)}, tx=tx)
      >>> print(hyperparameters(ft.population.stack([state, state])))
      {'learning_rate': array([0.5, 0.5], dtype=float32)}
    """
    require_population(population, "population")
    leaves = dict(_tree.leaves_with_path(population.states))
    injected_paths = list(filter(_is_injected, leaves))
    counts = Counter(map(_name, injected_paths))
    values = {}
    for path in injected_paths:
        is_unique = counts[_name(path)] == 1
        values[_name(path) if is_unique else path] = np.asarray(leaves[path])
    return values


def with_hyperparameters(population: PopulationState, values: Mapping[str, Any]) -> PopulationState:
    """Returns the population with new hyperparameters, one value for each member.

    Args:
      population: The population.
      values: Arrays `[N]`, or `[N, ...]` for leaves that are not scalars. Their names are those of
        hyperparameters that `optax.inject_hyperparams` keeps in the state, such as
        ``learning_rate``, or patterns of paths in a member's state, such as
        ``model_state/loss_weight`` or ``**/hyperparams/learning_rate``.

    Returns:
      The population. The leaves keep their dtypes.

    Raises:
      ValueError: A name matches no leaf of the state (the error lists candidates) or several, or
        a schedule sets the hyperparameter; or `values` does not have one value for each member.
      TypeError: `population` is not a `PopulationState`.

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
    names = dict[str, str]()
    for name, paths in matching_paths(population, values).items():
        names |= dict.fromkeys(paths, name)

    def replace(key_path: Any, leaf: jax.Array) -> jax.Array:
        name = names.get(_tree.path_str(key_path))
        return leaf if name is None else _new_leaf(name, values[name], leaf)

    return population.replace(states=jax.tree_util.tree_map_with_path(replace, population.states))


def matching_paths(population: PopulationState, names: Iterable[str]) -> dict[str, list[str]]:
    """Returns the paths of the leaves that each name stands for; see `with_hyperparameters`."""
    paths = list(dict(_tree.leaves_with_path(population.states)))
    return {name: _paths_of(name, paths) for name in names}


def _paths_of(name: str, paths: list[str]) -> list[str]:
    """Returns the paths that a name or a pattern matches, at least one."""
    if "/" in name:
        # A path may have characters of a pattern, such as brackets.
        is_path = name in paths
        matches = [name] if is_path else [x for x in paths if _patterns.matches(name, x)]
    else:
        matches = [path for path in paths if _is_injected(path) and _name(path) == name]
        if not matches and name in paths:
            matches = [name]
        # One of several optimizers' rates must not be set by accident.
        ambiguous = matches if len(matches) > 1 else []
        advice = f"Use its path, or a pattern for all of them: '**/{_INJECTED}/{name}'."
        expected = f"one leaf of the state for {name!r}"
        require_no_problems("hyperparameters", ambiguous, expected, advice)
    injected = ", ".join(map(_name, filter(_is_injected, paths))) or "none"
    candidates = _patterns.closest_patterns(name, paths) if "/" in name else paths[:3]
    advice = (
        f"Injected hyperparameters: {injected}; optax.inject_hyperparams injects them. Other "
        f"leaves are named by their path, such as {', '.join(candidates)}."
    )
    require(matches, "hyperparameters", "the name of a leaf of the state", name, advice)
    scheduled = [path for path in matches if _is_injected(path) and is_scheduled(path, paths)]
    advice = (
        "A schedule would overwrite it at the next step. Inject its factor: "
        "optax.inject_hyperparams(lambda peak: optax.adam(lambda count: peak * schedule(count)))"
        "(peak=1e-3)."
    )
    expected = f"the name of a number for {name!r}"
    require_no_problems("hyperparameters", scheduled, expected, advice)
    return matches


def _new_leaf(name: str, values: Any, leaf: jax.Array) -> jax.Array:
    """Returns the values with the dtype and the sharding of the leaf that they replace."""
    array = jnp.asarray(values)
    # Integer leaves, such as counts, must not get rounded floats.
    has_dtype = jnp.issubdtype(leaf.dtype, jnp.inexact) or array.dtype == leaf.dtype
    expected = f"one value for each member, {_tree.strong_spec(leaf)}"
    is_valid = array.shape == leaf.shape and has_dtype
    require(is_valid, f"hyperparameters[{name!r}]", expected, array)
    return _tree.device_put_like(array.astype(leaf.dtype), leaf)


def _is_injected(path: str) -> bool:
    return path.split("/")[-2:-1] == [_INJECTED]


def _name(path: str) -> str:
    return path.split("/")[-1]
