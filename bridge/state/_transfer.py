"""Conversions between a compiled optimizer's variables and a state of optax."""

from collections.abc import Mapping
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp

from bridge import keras_private
from bridge.model import _variables
from bridge.model._names import Path
from bridge.optim._optax_optimizer import OptaxOptimizer
from bridge.optim._optimizers import inner_optimizer, step_counter
from bridge.optim._slots import (
    KerasOptState,
    Role,
    from_plain_array,
    kind_of,
    roles_of_leaves,
    roles_of_variables,
    to_plain_array,
)
from functrain.internal import PyTree
from functrain.internal import tree as _tree

# An optimizer's variables, or None, with an array for each.
Pairs: TypeAlias = list[tuple[Any, jax.Array]]


class OptimizerMismatchError(ValueError):
    """The Keras optimizer and the optax state cannot hold each other's values."""

    def __init__(self, problem: str) -> None:
        super().__init__(
            f"optimizer: expected one that tx and the compiled model have in common: {problem}. "
            'Without its state: bridge.create_state(model, tx, optimizer="new"), or '
            'bridge.to_keras(state, model, optimizer="leave").'
        )


def from_optimizer(opt_state: PyTree, model: Any) -> tuple[PyTree, jax.Array]:
    """Returns a fresh state with copies of the optimizer's variables, and its iterations.

    Raises:
      OptimizerMismatchError: The optimizer is not built, or has other variables.
    """
    optimizer = _optimizer(model, opt_state)
    if not optimizer.built:
        problem = f"the optimizer {optimizer.name!r} has not been built, and has no slots"
        raise OptimizerMismatchError(problem)
    layout = _variables.layout(model)
    # A new state has a leaf for every slot, which the optimizer's variables replace.
    values = []
    for variable, leaf in _pairs(opt_state, layout, optimizer, may_lack_params=False):
        values.append(leaf if variable is None else from_plain_array(variable.value, leaf))
    new_state = jax.tree.unflatten(jax.tree.structure(opt_state), values)
    return _tree.copy(new_state), step_counter(optimizer).value


def to_optimizer(opt_state: PyTree, model: Any, layout: _variables.Layout, *, step: Any) -> Pairs:
    """Returns new values for the variables of the model's optimizer, and builds it if necessary.

    Slots of params that were frozen or masked out of the state keep their values, and so does the
    count of steps if `step` is None and the state has no count.

    Args:
      opt_state: The state of optax.
      model: The model.
      layout: The model's variables by their paths in the state.
      step: The number of updates, or None.

    Raises:
      OptimizerMismatchError: The state has no value for some variables of the optimizer.
    """
    optimizer = _optimizer(model, opt_state)
    # Slots are made when the optimizer is built, at its first step in Keras.
    if not optimizer.built:
        with keras_private.optimizers.atomic_build(optimizer):
            optimizer.build(model.trainable_variables)
    # The step comes first: if the state counts updates too, its own count overwrites the step.
    pairs: Pairs = []
    if step is not None:
        pairs.append((step_counter(optimizer), jnp.asarray(step, jnp.int32)))
    for variable, leaf in _pairs(opt_state, layout, optimizer, may_lack_params=True):
        if variable is not None:
            pairs.append((variable, to_plain_array(leaf)))
    return pairs


def _optimizer(model: Any, opt_state: PyTree) -> Any:
    """Returns the optimizer of a model.

    Raises:
      OptimizerMismatchError: There is none, or one of a class that cannot hold the state.
    """
    optimizer = getattr(model, "optimizer", None)
    if optimizer is None:
        raise OptimizerMismatchError("the model has not been compiled with an optimizer")
    # An OptaxOptimizer can hold any state of optax, and is compared leaf by leaf.
    if isinstance(inner_optimizer(optimizer), OptaxOptimizer):
        return optimizer
    kinds = [state.kind for state in _tree.nodes(opt_state, KerasOptState)]
    if not kinds or any(kind != kind_of(optimizer) for kind in kinds):
        raise _no_common_state(optimizer)
    return optimizer


def _no_common_state(optimizer: Any) -> OptimizerMismatchError:
    return OptimizerMismatchError(
        f"{type(optimizer).__name__} cannot hold this state of optax, only that of "
        "bridge.optimizer(model.optimizer); an OptaxOptimizer holds the states of its tx"
    )


def _pairs(
    opt_state: PyTree, layout: _variables.Layout, optimizer: Any, *, may_lack_params: bool
) -> Pairs:
    """Returns each leaf of a state with the optimizer's variable of the same role, or None.

    Args:
      opt_state: The state of optax.
      layout: The model's variables by their paths in the state.
      optimizer: Its optimizer, which is built.
      may_lack_params: Allows the state to have no leaf at all for some params: frozen ones.

    Raises:
      OptimizerMismatchError: A leaf or a variable has no counterpart, or one of another shape or
        dtype.
    """
    params = layout.params
    # Float8 scales are not part of a state's params. Keras has few slots for them.
    scales = [v for path, v in layout.model_state.items() if path[0] == _variables.OVERWRITTEN]
    # An optimizer keeps the variables that it was built for when layers are frozen afterwards.
    try:
        all_variables = _variable_by_role(optimizer, [*params.values(), *scales])
    except KeyError as error:
        raise OptimizerMismatchError(
            f"the optimizer {optimizer.name!r} was built for other variables than the model "
            "trains now. If layers were frozen or unfrozen, compile the model again, with a new one"
        ) from error
    roles = _roles(opt_state, optimizer, {path: i for i, path in enumerate(params)})
    # A frozen param lacks all of its slots. If a param lacks only some, or if all params lack all,
    # the state is that of another optimizer.
    owners = {None, *(role.owner for role in roles if role)}
    has_slots = len(owners) > 1
    if not (may_lack_params and has_slots):
        owners = {None, *range(len(params))}
    variable_by_role = {role: v for role, v in all_variables.items() if role.owner in owners}
    if set(roles) - {None} != variable_by_role.keys():
        raise _no_common_state(optimizer)
    variables: list[Any] = [variable_by_role.get(role) if role else None for role in roles]
    pairs = list(zip(variables, jax.tree.leaves(opt_state), strict=True))
    for variable, leaf in pairs:
        slot, array = getattr(variable, "value", None), to_plain_array(leaf)
        if slot is not None and _tree.strong_spec(slot) != _tree.strong_spec(array):
            problem = f"{variable.path} is {_tree.spec(slot)}, its leaf in tx {_tree.spec(array)}"
            raise OptimizerMismatchError(problem)
    return pairs


def _roles(opt_state: PyTree, optimizer: Any, params: Mapping[Path, int]) -> list[Role | None]:
    """Returns the role that each leaf of a state has in the optimizer; None if it has none."""
    if isinstance(inner_optimizer(optimizer), OptaxOptimizer):
        return [*roles_of_leaves(opt_state, params)]
    roles: list[Role | None] = []
    for node in jax.tree.leaves(opt_state, is_leaf=lambda x: isinstance(x, KerasOptState)):
        if not isinstance(node, KerasOptState):
            roles.append(None)
            continue
        # The names of Keras, in two groups.
        for name, owner in roles_of_leaves(node, params):
            roles.append(Role(name.removeprefix("scalars/").removeprefix("slots/"), owner))
    return roles


def _variable_by_role(optimizer: Any, params: list[Any]) -> dict[Role, Any]:
    """Returns the variables of a built optimizer by role."""
    # A LossScaleOptimizer holds the optimizer that has the slots.
    innermost = inner_optimizer(optimizer)
    if not isinstance(innermost, OptaxOptimizer):
        return dict(zip(roles_of_variables(optimizer, params), optimizer.variables, strict=True))
    index = {id(variable): i for i, variable in enumerate(params)}
    mapping = innermost.mapping
    paths = {path: index[id(variable)] for path, variable in mapping.trained.items()}
    return dict(zip(roles_of_leaves(innermost.opt_state, paths), mapping.slots, strict=True))
