"""The best member, and copies of the best in place of the worst."""

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from functrain.common import _tree
from functrain.common._checks import require, require_one_of
from functrain.population._hyperparameters import places, with_hyperparameters
from functrain.population._state import PopulationState, require_population


def select(population: PopulationState, values: Any, *, mode: str) -> Any:
    """Returns the state of the best member, as it would be alone.

    Args:
      population: The population.
      values: One value for each member, `[N]`, such as ``history.epochs["val_loss"][-1]`` or a
        value that `evaluate` returns. NaN is never best.
      mode: ``"min"`` or ``"max"``, which is better.

    Returns:
      A state, such as a `TrainState`; of a Keras model ``bridge.to_keras`` takes it home. Which
      member it is: ``np.nanargmin(values)``.

    Raises:
      ValueError: The values are not one a member, or all NaN, or `mode` is neither.

    Examples:
      >>> import functrain as ft, jax.numpy as jnp
      >>> population = ft.population.stack([{"w": jnp.float32(i)} for i in range(3)])
      >>> print(select(population, [0.5, 0.1, jnp.nan], mode="min")["w"])
      1.0
    """
    return population[int(_ranked(population, values, mode)[0])]


def resample(
    population: PopulationState,
    values: Any,
    key: jax.Array,
    *,
    mode: str,
    fraction: float = 0.25,
    perturb: Mapping[str, Any] | None = None,
) -> PopulationState:
    """Puts copies of the best members in place of the worst: a step of population-based training.

    The copies keep the random keys of the members they replace, so that they go other ways from
    there, and so do their hyperparameters, if those are perturbed. In a fit, a hook does it:
    ``event.state = resample(event.state, event.values["val_loss"], key, mode="min")``.

    Truncation selection of Jaderberg et al., 2017 (https://arxiv.org/abs/1711.09846).

    Args:
      population: The population.
      values: One value for each member, `[N]`. NaN is worst.
      key: A typed key `key[]`; fold the step into it: ``jax.random.fold_in(key, event.step)``.
      mode: ``"min"`` or ``"max"``, which is better.
      fraction: How many of the members are replaced, and how many they are replaced by: at least
        one, and at most half.
      perturb: Hyperparameters to multiply in the copies, by name as in `with_hyperparameters`;
        each copy by one of the factors given, such as ``{"learning_rate": (0.8, 1.25)}``.

    Returns:
      The population; a copy is active where its original is.

    Raises:
      ValueError: The values are not one a member, all are NaN, `mode` or `fraction` makes no
        sense, or a hyperparameter has no place in the state.

    Examples:
      >>> import functrain as ft, jax, jax.numpy as jnp
      >>> population = ft.population.stack([{"w": jnp.float32(i)} for i in range(4)])
      >>> new = resample(population, [0.5, 0.1, 0.9, 0.3], jax.random.key(0), mode="min")
      >>> print(new.states["w"])
      [0. 1. 1. 3.]
    """
    order = _ranked(population, values, mode)
    expected = f"a part of two members or more, of {len(order)}, above 0 and up to 0.5"
    require(0 < fraction <= 0.5 and len(order) >= 2, "fraction", expected, fraction)
    count = max(1, int(len(order) * fraction))
    chosen = jax.random.choice(jax.random.fold_in(key, 0), order[:count], (count,))
    sources = np.arange(len(order))
    sources[order[-count:]] = np.asarray(chosen)

    def taken(x: jax.Array) -> jax.Array:
        return x if _tree.is_key(x) else _tree.device_put_like(x[sources], x)

    copied = jax.tree.map(taken, population)
    return _perturbed(copied, sources != np.arange(len(order)), key, perturb or {})


def _perturbed(
    population: PopulationState, is_copy: np.ndarray, key: jax.Array, perturb: Mapping[str, Any]
) -> PopulationState:
    leaves = dict(_tree.leaves_with_path(population.states))
    values = {}
    for i, (name, paths) in enumerate(sorted(places(population, perturb).items())):
        for path in paths:
            leaf = leaves[path]
            factors = jnp.asarray(perturb[name], leaf.dtype)
            drawn = jax.random.choice(jax.random.fold_in(key, i + 1), factors, (len(is_copy),))
            factor = jnp.where(is_copy, drawn, 1).astype(leaf.dtype)
            values[path] = leaf * factor.reshape(-1, *[1] * (leaf.ndim - 1))
    return with_hyperparameters(population, values)


def _ranked(population: PopulationState, values: Any, mode: str) -> np.ndarray:
    """Returns the numbers of the members, the best first."""
    require_population(population, "population")
    values = np.asarray(values, np.float64)
    expected = f"one value for each of the {len(population)} members, [{len(population)}]"
    advice = "Of a history it is that of one epoch: history.epochs['val_loss'][-1]."
    require(values.shape == (len(population),), "values", expected, values, advice)
    require_one_of("mode", mode, ("min", "max"))
    if np.isnan(values).all():
        raise ValueError("values: expected at least one that is not NaN, got only NaN.")
    return np.argsort(values if mode == "min" else -values, kind="stable")
