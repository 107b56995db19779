"""The states of many members as one: every leaf has a leading axis of members."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp

from functrain.common import _repr, _tree
from functrain.common._checks import is_integer, require, require_instance, require_no_problems
from functrain.common._types import PyTree


class PopulationState(flax.struct.PyTreeNode, eq=False):
    """The states of N members, stacked, and which of them are still trained.

    A state as any other: copied, saved, divided over devices. ``population[i]`` is the state of
    member i, as it would be alone; ``len(population)`` is N, and so ``list(population)`` works.
    The members' axis goes over devices with ``jax.device_put(population, NamedSharding(mesh,
    PartitionSpec("members")))``.

    Attributes:
      states: A pytree whose leaves are `[N, ...]`, such as a `TrainState` of them.
      active: `bool[N]`. Of a member that is not, no step changes a bit.

    Examples:
      >>> import jax.numpy as jnp
      >>> population = stack([{"w": jnp.zeros(3)}, {"w": jnp.ones(3)}])
      >>> population
      PopulationState(2 members, 2 active, states=6 in 1 array)
      >>> print(population[1]["w"], len(population))
      [1. 1. 1.] 2
    """

    states: PyTree
    active: jax.Array

    @classmethod
    def of(cls, stacked: PyTree) -> "PopulationState":
        """Returns the population of states that are stacked already, as `jax.vmap` makes them.

        Args:
          stacked: A pytree of arrays `[N, ...]`, at least one.

        Raises:
          ValueError: A leaf has another leading axis than the first, or none; it is named.
        """
        shapes = {path: jnp.shape(x) for path, x in _tree.leaves_with_path(stacked)}
        leading = next((shape[:1] for shape in shapes.values()), ())
        wrong = [f"{p}: {s}" for p, s in shapes.items() if not s or s[:1] != leading]
        wrong = wrong if shapes else ["no leaves"]
        advice = "functrain.population.stack(states) stacks states."
        require_no_problems(
            "stacked", wrong, f"leaves [N, ...] with one leading axis, {leading}", advice
        )
        return cls(stacked, jnp.ones(leading, bool))

    def __len__(self) -> int:
        return int(self.active.shape[0])

    def __getitem__(self, i: int) -> Any:
        """Returns the state of one member."""
        count = len(self)
        expected = f"a number from 0 to {count - 1}"
        require(-count <= i < count, "member", expected, i, error=IndexError)
        return jax.tree.map(lambda x: x[i], self.states)

    def __repr__(self) -> str:
        count = getattr(self.active, "size", "?")
        readable = _tree.is_readable(self.active)
        active = f"{int(self.active.sum())} active, " if readable else ""
        return f"PopulationState({count} members, {active}states={_repr.brief(self.states)})"


def create(
    make_state: Callable[[jax.Array], PyTree],
    key: jax.Array,
    *,
    members: int | None = None,
    hyperparameters: Mapping[str, Any] | None = None,
) -> PopulationState:
    """Returns a population of states that one function makes of different keys.

    Member i is ``make_state(jax.random.fold_in(key, i))``, to the bit: the function is called once
    a member, and may be any. ``PopulationState.of(jax.vmap(make_state)(keys))`` is faster where
    there are thousands.

    Args:
      make_state: Makes the state of one member, of a typed key `key[]`: usually a `TrainState`
        whose `rng` comes of that key as well, so that members draw numbers of their own.
      key: A typed key `key[]`.
      members: N; by default as many as there are hyperparameters.
      hyperparameters: By name, `[N]` each; see `with_hyperparameters`.

    Returns:
      The population, all members active.

    Raises:
      ValueError: Neither says how many members there are, or they differ, or a hyperparameter has
        no place in the state; or the states differ in structure or shapes.

    Examples:
      >>> import functrain as ft, jax, jax.numpy as jnp, optax
      >>> tx = optax.inject_hyperparams(optax.sgd)(learning_rate=0.1)
      >>> def make_state(key):
      ...     params = {"w": jax.random.normal(key, (3,))}
      ...     return ft.TrainState.create(params=params, tx=tx, rng=key)
      >>> rates = {"learning_rate": jnp.array([0.1, 0.01])}
      >>> population = create(make_state, jax.random.key(0), hyperparameters=rates)
      >>> print(population[1].opt_state.hyperparams["learning_rate"])
      0.01
    """
    from functrain.population._hyperparameters import places, with_hyperparameters

    chosen = dict(hyperparameters or {})
    count = _count(members, chosen)
    states = [make_state(jax.random.fold_in(key, 0))]
    places(PopulationState.of(jax.tree.map(lambda x: jnp.asarray(x)[None], states[0])), chosen)
    states += [make_state(jax.random.fold_in(key, i)) for i in range(1, count)]
    return with_hyperparameters(stack(states), chosen)


def stack(states: Sequence[PyTree]) -> PopulationState:
    """Returns the population of some states, which stay alive.

    Args:
      states: Of one structure, with leaves of the same shapes and dtypes.

    Raises:
      ValueError: There is none, or one differs from the first: the leaves that do are named.

    Examples:
      >>> import jax.numpy as jnp
      >>> stack([{"w": jnp.zeros(3)}] * 4).states["w"].shape
      (4, 3)
    """
    require(states, "states", "at least one", states)
    states = [_tree.copy(state) for state in states]
    for i, state in enumerate(states):
        expected = f"member {i} with the structure of member 0"
        advice = "Train members of different sizes in populations of their own."
        require_no_problems("states", _tree.differences(states[0], state), expected, advice)
    return PopulationState.of(jax.tree.map(lambda *leaves: jnp.stack(leaves), *states))


def require_population(population: Any, name: str = "state") -> None:
    """Raises TypeError unless the argument of this name is a population."""
    advice = (
        "Make one with functrain.population.create(make_state, key, members=N), stack(states), "
        "or PopulationState.of(stacked)."
    )
    expected = "a functrain.population.PopulationState"
    require_instance(name, population, PopulationState, expected, advice)


def _count(members: int | None, hyperparameters: Mapping[str, Any]) -> int:
    counts = {name: len(values) for name, values in hyperparameters.items()}
    if members is not None:
        counts = {"members": members, **counts}
    count = next(iter(counts.values()), None)
    if len(set(counts.values())) != 1 or not is_integer(count, 1):
        got = ", ".join(f"{name}: {n}" for name, n in counts.items()) or "neither"
        raise ValueError(
            "members and hyperparameters: expected one number of members, from members= or from "
            f"hyperparameters of that length, got {got}"
        )
    return count
