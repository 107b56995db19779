"""What a compiled optimizer remembers, as a state of optax, and back."""

import re
from collections.abc import Mapping
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import optax

from bridge import keras_private
from bridge.model import _variables
from bridge.model._names import Path
from bridge.optim._native import KerasCount, slot_fields
from bridge.optim._optax_optimizer import OptaxOptimizer, from_numbers, key_impl, numbers
from bridge.optim._optimizers import inner
from bridge.optim._slots import KerasOptState, Role, roles_of_leaves, roles_of_variables
from functrain.internal import PyTree
from functrain.internal import tree as _tree

# An optimizer's variables, with a value for each.
Pairs: TypeAlias = list[tuple[Any, jax.Array]]

# A schedule has no learning rate to hold, and some of optax's states count no updates.
_OPTIONAL = {Role("learning_rate"), Role("iterations")}


class UnfitError(ValueError):
    """The optimizer and the state have nothing to say to each other; the message says why."""


def from_optimizer(opt_state: PyTree, model: Any) -> tuple[PyTree, jax.Array]:
    """Returns a fresh state with copies of what the optimizer remembers, and its iterations.

    Raises:
      UnfitError: The optimizer is not built, or remembers something else.
    """
    optimizer = _optimizer(model, opt_state)
    if not optimizer.built:
        raise UnfitError(f"the optimizer {optimizer.name!r} has not been built, and has no slots")
    variables = _counterparts(opt_state, model, optimizer, may_lack_params=False)
    leaves, treedef = jax.tree.flatten(opt_state)
    new = [
        leaf if variable is None else from_numbers(variable.value, key_impl(leaf))
        for variable, leaf in zip(variables, leaves, strict=True)
    ]
    return _tree.copy(jax.tree.unflatten(treedef, new)), _iterations(optimizer).value


def to_optimizer(opt_state: PyTree, model: Any, step: Any) -> Pairs:
    """Returns new values for the variables of the model's optimizer, which is built if need be.

    Slots of params that were frozen or masked out of the state are left as they are.

    Raises:
      UnfitError: The state does not say what the optimizer remembers.
    """
    optimizer = _optimizer(model, opt_state)
    if not optimizer.built:
        with keras_private.optimizers.atomic_build(optimizer):
            optimizer.build(model.trainable_variables)
    variables = _counterparts(opt_state, model, optimizer, may_lack_params=True)
    pairs = zip(variables, jax.tree.leaves(opt_state), strict=True)
    # The step comes first: where the state counts updates too, its own count is what stays.
    return [
        (_iterations(optimizer), jnp.asarray(step, jnp.int32)),
        *((variable, numbers(leaf)) for variable, leaf in pairs if variable is not None),
    ]


def _optimizer(model: Any, opt_state: PyTree) -> Any:
    """Returns the optimizer of a model, if it is of a kind that may fit the state."""
    optimizer = getattr(model, "optimizer", None)
    if optimizer is None:
        raise UnfitError("the model has not been compiled with an optimizer")
    kinds = (KerasOptState, KerasCount, *slot_fields(optimizer, opt_state))
    if not (isinstance(inner(optimizer), OptaxOptimizer) or _tree.nodes(opt_state, *kinds)):
        raise UnfitError(_no_counterpart(optimizer, opt_state))
    return optimizer


def _iterations(optimizer: Any) -> Any:
    """Returns the variable that counts steps: `iterations` divides it where Keras accumulates."""
    return inner(optimizer).variables[0]


def _counterparts(
    opt_state: PyTree, model: Any, optimizer: Any, *, may_lack_params: bool
) -> list[Any]:
    """Returns the variable that holds the same as a leaf, or None, for each leaf of a state.

    Args:
      opt_state: The state of optax.
      model: The model.
      optimizer: Its optimizer, which is built.
      may_lack_params: Whether the state may have no leaf at all for some params: frozen ones.

    Raises:
      UnfitError: A leaf or a variable has no counterpart, or one of another shape or dtype.
    """
    params = _variables.layout(model).params
    roles = _roles(opt_state, optimizer, {path: i for i, path in enumerate(params)})
    try:
        by_role = _by_role(optimizer, list(params.values()))
    except KeyError as error:
        raise UnfitError(
            f"the optimizer {optimizer.name!r} was built for other variables than the model "
            "trains now. If layers were frozen or unfrozen, compile the model again"
        ) from error
    missing = by_role.keys() - {*roles, *_OPTIONAL}
    trained = {None, *(role.owner for role in roles if role)}
    is_frozen = may_lack_params and trained.isdisjoint(role.owner for role in missing)
    if set(roles) - {None, *_OPTIONAL} - by_role.keys() or (missing and not is_frozen):
        raise UnfitError(_no_counterpart(optimizer, opt_state))
    variables = [by_role.get(role) if role else None for role in roles]
    lines = [
        f"{v.path}: expected {_tree.spec(v.value)}, got {_tree.spec(x)}"
        for v, x in zip(variables, map(numbers, jax.tree.leaves(opt_state)), strict=True)
        if v is not None and (v.shape, v.dtype) != (x.shape, str(x.dtype))
    ]
    if lines:
        raise UnfitError(f"leaves of opt_state do not fit its slots:\n{_tree.bullets(lines)}")
    return variables


def _roles(opt_state: PyTree, optimizer: Any, params: Mapping[Path, int]) -> list[Role | None]:
    """Returns for each leaf of a state the role that it has in the optimizer, if any."""
    if isinstance(inner(optimizer), OptaxOptimizer):
        return [*roles_of_leaves(opt_state, params)]
    fields = slot_fields(optimizer, opt_state)
    kinds = (KerasOptState, KerasCount, optax.ScaleByScheduleState, *fields)
    nodes = jax.tree.leaves(opt_state, is_leaf=lambda x: isinstance(x, kinds))
    return [
        _keras_role(node, role, fields.get(type(node), {}))
        for node in nodes
        for role in roles_of_leaves(node, params)
    ]


def _keras_role(node: Any, role: Role, slots: Mapping[str, str]) -> Role | None:
    """Returns the role in a Keras optimizer of a leaf that has a role in a node of a state."""
    if isinstance(node, KerasOptState):
        return Role(role.name.removeprefix("scalars/").removeprefix("slots/"), role.owner)
    names = {"count": "iterations", "iterations": "iterations", **slots}
    return Role(names[role.name], role.owner) if role.name in names else None


def _by_role(optimizer: Any, params: list[Any]) -> dict[Role, Any]:
    """Returns the variables of a built optimizer by role."""
    own = inner(optimizer)
    if not isinstance(own, OptaxOptimizer):
        return dict(zip(roles_of_variables(optimizer, params), optimizer.variables, strict=True))
    number = {id(variable): i for i, variable in enumerate(params)}
    plan = own.plan
    paths = {path: number[id(v)] for path, v in plan.trained.items()}
    return dict(zip(roles_of_leaves(own.opt_state, paths), plan.slots, strict=True))


def _no_counterpart(optimizer: Any, opt_state: PyTree) -> str:
    own = inner(optimizer)
    if isinstance(own, OptaxOptimizer):
        return (
            f"the state of its transformation is {_kinds(own.opt_state)}, that of tx is "
            f"{_kinds(opt_state)}"
        )
    return (
        f"nothing is known that both {type(optimizer).__name__} and this state of optax hold: "
        f"{_kinds(opt_state)}. Known are bridge.optimizer(model.optimizer), with or "
        "without native=True, the tx of a bridge.OptaxOptimizer, and optax's own adam, adamw, "
        "lion, rmsprop, adagrad and adadelta for Keras's of these names"
    )


def _kinds(state: Any) -> str:
    """Returns the names of the states in a state."""
    names = re.findall(r"namedtuple\[(\w+)\]", str(jax.tree.structure(state)))
    return ", ".join(dict.fromkeys(names)) or "no named state"
