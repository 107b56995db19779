"""Selects the best member, or replaces the worst members by copies of the best."""

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from functrain.common import _tree
from functrain.common._checks import require, require_one_of
from functrain.population._hyperparameters import matching_paths, with_hyperparameters
from functrain.population._state import PopulationState, require_population


def select(population: PopulationState, values: Any, *, mode: str) -> Any:
    """Returns the state of the best member, as it would be alone.

    Args:
      population: The population.
      values: One value for each member, `[N]`, such as ``history.epochs["val_loss"][-1]`` or a
        value that `evaluate` returns. NaN is never best. After a fit in which `EarlyStopping` has
        restored the best states, pass its `best`.
      mode: ``"min"`` if the smallest value is the best, ``"max"`` if the largest is.

    Returns:
      The state of one member, such as a `TrainState`, which ``bridge.to_keras`` accepts if it came
      from a Keras model. Its index is ``np.nanargmin(values)``, or with ``"max"``
      ``np.nanargmax(values)``.

    Raises:
      ValueError: `values` does not have one value for each member, all are NaN, or `mode` is
        invalid.
      TypeError: `population` is not a `PopulationState`.

    Examples:
      >>> import functrain as ft, jax.numpy as jnp
      >>> population = ft.population.stack([{"w": jnp.float32(i)} for i in range(3)])
      >>> print(select(population, [0.5, 0.1, jnp.nan], mode="min")["w"])
      1.0
    """
    return population[int(_rank(population, values, mode)[0])]


def resample(
    population: PopulationState,
    values: Any,
    key: jax.Array,
    *,
    mode: str,
    fraction: float = 0.25,
    perturb: Mapping[str, Any] | None = None,
) -> PopulationState:
    """Replaces the worst members by copies of the best, as in population-based training.

    A copy keeps the random keys of the member that it replaces, so that it develops differently
    from its original; perturbed hyperparameters differ as well. Call it in a hook of a fit:
    ``event.state = resample(event.state, event.values["val_loss"], key, mode="min")``.

    This is the truncation selection of Jaderberg et al., 2017 (https://arxiv.org/abs/1711.09846).

    Args:
      population: The population.
      values: One value for each member, `[N]`. NaN is worst, and never copied.
      key: A typed key `key[]`; fold the step into it: ``jax.random.fold_in(key, event.step)``.
      mode: ``"min"`` if small values are better, ``"max"`` if large ones are.
      fraction: The fraction of the members that is replaced, and of those that are copied: at
        least one member, at most half of them. If fewer members than that have a value other than
        NaN, only those are copied.
      perturb: Factors by the name of a hyperparameter, as in `with_hyperparameters`. In each copy,
        the hyperparameter is multiplied by one of its factors, drawn at random:
        ``{"learning_rate": (0.8, 1.25)}``.

    Returns:
      The population. A copy is active if its original is.

    Raises:
      ValueError: `values` does not have one value for each member, all are NaN, `mode` or
        `fraction` is invalid, a hyperparameter is not in the state or its factors are not a
        sequence, or an integer one has factors that are not integers.
      TypeError: `population` is not a `PopulationState`.

    Examples:
      >>> import functrain as ft, jax, jax.numpy as jnp
      >>> population = ft.population.stack([{"w": jnp.float32(i)} for i in range(4)])
      >>> new = resample(population, [0.5, 0.1, 0.9, 0.3], jax.random.key(0), mode="min")
      >>> print(new.states["w"])
      [0. 1. 1. 3.]
    """
    ranking = _rank(population, values, mode)
    members = len(ranking)
    expected = f"a number above 0 and up to 0.5, with two members or more (there are {members})"
    require(0 < fraction <= 0.5 and members >= 2, "fraction", expected, fraction)
    count = max(1, int(members * fraction))
    sources = np.arange(members)
    # A member whose value is NaN is never copied, even if fewer than `count` others are left.
    has_value = ~np.isnan(np.asarray(values, np.float64))
    best, worst = ranking[: min(count, has_value.sum())], ranking[-count:]
    # fold_in keeps this draw apart from those of the perturbations, which fold in 1, 2, ...
    sources[worst] = np.asarray(jax.random.choice(jax.random.fold_in(key, 0), best, (count,)))

    def copy_members(x: jax.Array) -> jax.Array:
        # With the key of its original a copy would draw the same numbers and stay identical.
        return x if _tree.is_key(x) else _tree.device_put_like(x[sources], x)

    population = population.replace(
        states=jax.tree.map(copy_members, population.states),
        active=copy_members(population.active),
    )
    return _perturb_copies(population, sources != np.arange(members), key, perturb or {})


def _perturb_copies(
    population: PopulationState, is_copy: np.ndarray, key: jax.Array, perturb: Mapping[str, Any]
) -> PopulationState:
    """Multiplies hyperparameters of the copies by factors drawn at random.

    Args:
      population: The population.
      is_copy: `bool[N]`.
      key: The key of `resample`, which folds 0 into it for its own draw.
      perturb: Factors by name.
    """
    leaves = dict(_tree.leaves_with_path(population.states))
    values = {}
    # Sorted, so that the draws do not depend on the order of the dict.
    for i, (name, paths) in enumerate(sorted(matching_paths(population, perturb).items())):
        factors, argument = np.asarray(perturb[name]), f"perturb[{name!r}]"
        # jax.random.choice would take a single number n for range(n).
        expected = "a sequence of factors, such as (0.8, 1.25)"
        require(factors.ndim == 1 and factors.size, argument, expected, perturb[name])
        for path in paths:
            leaf = leaves[path]
            # An integer leaf times a fraction is no integer, which `with_hyperparameters` refuses.
            dtype = leaf.dtype if jnp.issubdtype(leaf.dtype, jnp.inexact) else None
            of_leaf = jnp.asarray(factors, dtype)
            drawn = jax.random.choice(jax.random.fold_in(key, i + 1), of_leaf, (len(is_copy),))
            factor = jnp.where(is_copy, drawn, jnp.ones_like(drawn))
            values[path] = leaf * factor.reshape(-1, *[1] * (leaf.ndim - 1))
    return with_hyperparameters(population, values)


def _rank(population: PopulationState, values: Any, mode: str) -> np.ndarray:
    """Returns the indices of the members, the best first and NaN last."""
    require_population(population, "population")
    values = np.asarray(values, np.float64)
    expected = f"one value for each of the {len(population)} members, [{len(population)}]"
    advice = "From a history, pass the values of one epoch: history.epochs['val_loss'][-1]."
    require(values.shape == (len(population),), "values", expected, values, advice)
    require_one_of("mode", mode, ("min", "max"))
    if np.isnan(values).all():
        raise ValueError("values: expected at least one that is not NaN, got only NaN.")
    # argsort puts NaN last in both directions. A stable sort ranks equal members by their index,
    # so that every process selects the same ones.
    return np.argsort(values if mode == "min" else -values, kind="stable")
