"""The states of many members, stacked: leaves have a leading axis of members, or are shared."""

import operator
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np

from functrain.common import _patterns, _repr, _tree
from functrain.common._checks import is_integer, require, require_instance, require_no_problems
from functrain.common._types import PyTree
from functrain.common._warnings import warn
from functrain.population._shared import join, split_states
from functrain.step._state import TrainState, require_key


class PopulationState(flax.struct.PyTreeNode, eq=False):
    """The stacked states of N members, with a mask of the members that are still trained.

    It can be copied, saved and sharded like any other state. ``population[i]`` is the state of
    member i, as it would be alone; ``len(population)`` is N, and ``list(population)`` works. To
    shard the axis of members over devices, use ``jax.device_put(population, NamedSharding(mesh,
    PartitionSpec("members")))`` with ``mesh = functrain.sharding.mesh({"members": -1})``, or with
    shared leaves, which lack that axis,
    ``population.replace(states=jax.device_put(population.states, ...))``.

    Attributes:
      states: A pytree whose leaves are `[N, ...]`, such as a `TrainState` of them. It has None in
        place of shared leaves.
      active: `bool[N]`. Steps do not change a member that is not active.
      shared: A pytree of the leaves that all members have in common, each stored once, and None in
        place of other leaves. Steps do not change them. None if members share nothing.

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
    shared: PyTree = None

    @classmethod
    def of(cls, stacked: PyTree) -> "PopulationState":
        """Returns the population of states that are already stacked, as by `jax.vmap`.

        Args:
          stacked: A pytree of arrays `[N, ...]`, at least one.

        Raises:
          ValueError: There are no leaves, a leaf has no axis, or its first axis is not that of the
            first leaf; these leaves are named.
        """
        leaves = jax.tree.leaves(stacked)
        require(leaves, "stacked", "at least one leaf [N, ...]", stacked)
        leading = jnp.shape(leaves[0])[:1]
        problems = _tree.format_leaves(
            stacked, lambda x: jnp.ndim(x) == 0 or jnp.shape(x)[:1] != leading
        )
        expected = "leaves [N, ...] whose first axis has the same size"
        advice = "functrain.population.stack(states) stacks states."
        require_no_problems("stacked", problems, expected, advice)
        return cls(stacked, jnp.ones(leading, bool))

    def __len__(self) -> int:
        return int(self.active.shape[0])

    def __getitem__(self, i: int) -> Any:
        """Returns the state of one member, with a copy of the leaves that members share."""
        # jax clamps an index that is out of range, so it is checked here; and list(population)
        # ends at the first IndexError.
        require_population(self)
        count, i = len(self), operator.index(i)
        expected = f"an index from {-count} to {count - 1}"
        require(-count <= i < count, "member", expected, i, error=IndexError)
        # Copied, since a program may consume the state of a member, or the population.
        return join(jax.tree.map(lambda x: x[i], self.states), _tree.copy(self.shared))

    def __repr__(self) -> str:
        count = getattr(self.active, "size", "?")
        # While the state is traced, or after it was donated, the mask has no values to count.
        is_readable = _tree.is_readable(self.active)
        active = f"{int(self.active.sum())} active, " if is_readable else ""
        shared = "" if self.shared is None else f", shared={_repr.brief(self.shared)}"
        states = _repr.brief(self.states)
        return f"PopulationState({count} members, {active}states={states}{shared})"


def create(
    make_state: Callable[[jax.Array], PyTree],
    key: jax.Array,
    *,
    members: int | None = None,
    hyperparameters: Mapping[str, Any] | None = None,
    shared: str | Sequence[str] = (),
) -> PopulationState:
    """Returns a population whose members are created from different random keys.

    Member i is ``make_state(jax.random.fold_in(key, i))``, to the bit: `make_state` is called once
    for each member and need not be traceable. For thousands of members,
    ``PopulationState.of(jax.vmap(make_state)(keys))`` is faster.

    Args:
      make_state: Creates the state of one member from a typed key `key[]`: usually a `TrainState`
        whose `rng` comes from that key as well, so that members draw different numbers. A warning
        says if the params do not come from it; `stack` is for members that start as equals.
      key: A typed key `key[]`.
      members: N. The length of the hyperparameters by default.
      hyperparameters: Arrays `[N]` by name; see `with_hyperparameters`.
      shared: Patterns of the leaves that all members have in common, stored once; see `stack`.

    Returns:
      The population, with all members active.

    Raises:
      TypeError: `make_state` is not a function, or `key` is not a single typed key.
      ValueError: The number of members is not given, or `members` and the hyperparameters
        disagree; a hyperparameter is not in the state; the states differ in structure or shapes;
        or leaves cannot be shared.

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
    # Imported here since hyperparameters are set in populations, which this file defines.
    from functrain.population._hyperparameters import matching_paths, with_hyperparameters

    is_function = callable(make_state) and not isinstance(make_state, type)
    expected, advice = "a function, key -> state", "stack(states) stacks states."
    require(is_function, "make_state", expected, make_state, advice, error=TypeError)
    require_key("key", key)
    hyperparameters = dict(hyperparameters or {})
    count = _count_members(members, hyperparameters)

    def make_states() -> Iterator[PyTree]:
        first = make_state(jax.random.fold_in(key, 0))
        # A misspelled hyperparameter is reported before all other members are created.
        matching_paths(_stack([first], shared), hyperparameters)
        yield first
        for i in range(1, count):
            yield make_state(jax.random.fold_in(key, i))

    population = with_hyperparameters(_stack(make_states(), shared), hyperparameters)
    _warn_of_equal_params(population.states)
    return population


def _warn_of_equal_params(states: PyTree) -> None:
    """Warns if all members have the same params, unless each of these is filled with one number."""
    leaves = jax.tree.leaves([state.params for state in _tree.nodes(states, TrainState)])
    for leaf in leaves:
        if not _tree.is_readable(leaf) or len(leaf) < 2 or not jnp.all(leaf == leaf[:1]):
            return
    if any(jnp.any(leaf != leaf.ravel()[:1]) for leaf in leaves):
        warn(
            "population.create: expected params that depend on the key, got the same for all "
            "members. Construct a module for each key, as in from_nnx(lambda rngs: Net(rngs=rngs)) "
            "and from_equinox(lambda key: Net(key)). For members that start as equals, use "
            "functrain.population.stack([state.replace(rng=k) for k in jax.random.split(key, N)])."
        )


def stack(states: Sequence[PyTree], *, shared: str | Sequence[str] = ()) -> PopulationState:
    """Stacks states into a population; the given states can still be used.

    Args:
      states: States with the same structure, shapes and dtypes.
      shared: Patterns of the paths of leaves that all states have in common and no step changes:
        ``"model_state/frozen/**"`` for models of `functrain.lora` and `functrain.freeze`. The
        population stores these leaves once.

    Raises:
      ValueError: There are no states, or one differs from the first; the leaves that differ are
        named. Or a pattern of `shared` matches no leaf, or one with other values in another state.

    Examples:
      >>> import jax.numpy as jnp
      >>> stack([{"w": jnp.zeros(3)}] * 4).states["w"].shape
      (4, 3)
      >>> states = [{"w": jnp.full(3, i), "base": jnp.ones(100)} for i in range(4)]
      >>> stack(states, shared="base")
      PopulationState(4 members, 4 active, states=12 in 1 array, shared=100 in 1 array)
    """
    require(states, "states", "at least one", states)
    return _stack(states, shared)


def _stack(states: Iterable[PyTree], shared: str | Sequence[str]) -> PopulationState:
    own_leaves, shared_leaves = split_states(states, _patterns.as_patterns("shared", shared))
    # Copied, since a run may donate the population's buffers and the caller keeps the states.
    own_leaves = [_tree.copy(state) for state in own_leaves]
    for i, state in enumerate(own_leaves):
        expected = f"member {i} with the structure of member 0"
        advice = "Train members of different sizes in separate populations."
        require_no_problems("states", _tree.differences(own_leaves[0], state), expected, advice)
    population = PopulationState.of(jax.tree.map(lambda *leaves: jnp.stack(leaves), *own_leaves))
    return population.replace(shared=_tree.copy(shared_leaves))


def require_population(population: Any, name: str = "state") -> None:
    """Raises TypeError unless an argument is a population, ValueError if its axis is explicit."""
    advice = (
        "Create one with functrain.population.create(make_state, key, members=N), stack(states), "
        "or PopulationState.of(stacked)."
    )
    expected = "a functrain.population.PopulationState"
    require_instance(name, population, PopulationState, expected, advice)
    # Shardings that the compiler chooses are not part of the type.
    spec = getattr(jax.typeof(population.active).sharding, "spec", ())
    expected = "members on an axis of a mesh with automatic axes"
    advice = (
        "jax.make_mesh makes explicit ones. Take functrain.sharding.mesh({'members': -1}), or pass "
        "axis_types=(jax.sharding.AxisType.Auto,) to jax.make_mesh."
    )
    require(not any(spec), name, expected, spec, advice)


def _count_members(members: int | None, hyperparameters: Mapping[str, Any]) -> int:
    """Returns the number of members, which all arguments must agree on."""
    counts = {} if members is None else {"members": members}
    for name, values in hyperparameters.items():
        expected = "a sequence with one value for each member"
        require(np.ndim(values), f"hyperparameters[{name!r}]", expected, values)
        counts[name] = len(values)
    numbers = set(counts.values())
    expected = "one number of members, from members= or from the length of the hyperparameters"
    got = ", ".join(f"{name}: {n}" for name, n in counts.items()) or "neither"
    advice = "Pass members=N, and N values of each."
    is_one = len(numbers) == 1 and is_integer(min(numbers), 1)
    require(is_one, "members and hyperparameters", expected, got, advice)
    return numbers.pop()
