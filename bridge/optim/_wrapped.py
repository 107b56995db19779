"""A Keras optimizer as an optax transformation that runs Keras's own code."""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import keras
import optax

from bridge import keras_private
from bridge.model import _variables
from bridge.model._names import Path
from bridge.model._scope import name_scopes
from bridge.optim._constraints import ConstraintState, update_to
from bridge.optim._slots import KerasOptState, Role, kind_of, roles_of_variables
from functrain.internal import PyTree, require
from functrain.internal import tree as _tree


class _Built(NamedTuple):
    """A Keras optimizer that was built for params of one structure, without values.

    Attributes:
      optimizer: The optimizer.
      roles: The roles of `optimizer.variables`.
      order: For each parameter, in the optimizer's order, the index of its leaf in the params.
      treedef: The structure of the params.
    """

    optimizer: Any
    roles: list[Role]
    order: list[int]
    treedef: Any

    def in_order(self, tree: PyTree) -> list[Any]:
        """Returns the leaves of a tree with the structure of the params, in optimizer order."""
        leaves = self.treedef.flatten_up_to(tree)
        return [leaves[i] for i in self.order]

    def to_tree(self, values: list[Any]) -> PyTree:
        """Returns values in optimizer order as a tree: the inverse of `in_order`."""
        leaves = dict(zip(self.order, values, strict=True))
        return self.treedef.unflatten(leaves[i] for i in range(len(leaves)))

    def to_state(self, values: list[Any], constraints: Any) -> KerasOptState:
        """Returns the values of `optimizer.variables` as a state."""
        scalars: dict[str, Any] = {}
        slots: dict[str, list[Any]] = {}
        for role, value in zip(self.roles, values, strict=True):
            if role.owner is None:
                scalars[role.name] = value
            else:
                no_slots = [optax.MaskedNode()] * len(self.order)
                slots.setdefault(role.name, no_slots)[role.owner] = value
        trees = dict(zip(slots, map(self.to_tree, slots.values()), strict=True))
        return KerasOptState(scalars, trees, constraints, kind_of(self.optimizer))

    def to_values(self, state: KerasOptState) -> list[Any]:
        """Returns the values of `optimizer.variables` in a state: the inverse of `to_state`."""
        slots = dict(zip(state.slots, map(self.in_order, state.slots.values()), strict=True))
        values = []
        for name, owner in self.roles:
            values.append(state.scalars[name] if owner is None else slots[name][owner])
        return values


class Wrapped:
    """The transformation of `bridge.optimizer`, with the methods `init` and `update`."""

    def __init__(self, optimizer: Any, model: keras.Layer | None) -> None:
        self.model = model
        self._built: dict[Any, _Built] = {}
        # A copy, since the caller may change or build the optimizer later.
        self.optimizer = _copy_unbuilt(optimizer)
        self._constraints = None if model is None else ConstraintState()

    def init(self, params: PyTree) -> KerasOptState:
        """Returns the state before the first update, with the values of the optimizer's `build`."""
        built, values = self._build(params)
        leaves = built.in_order(params)
        for i, role in enumerate(built.roles):
            param: Any = None if role.owner is None else leaves[role.owner]
            # A slot with the shape of its parameter is sharded like the parameter.
            if _tree.is_concrete(param) and values[i].shape == param.shape:
                values[i] = _tree.device_put_like(values[i], param)
        return built.to_state(values, self._constraints)

    def update(
        self, updates: PyTree, state: KerasOptState, params: PyTree = None
    ) -> tuple[PyTree, KerasOptState]:
        """Returns the update of the params, and the new state."""
        expected = "the params, since Keras returns new params instead of updates"
        advice = "Call tx.update(grads, opt_state, params)."
        require(params is not None, "bridge.optimizer", expected, params, advice)
        built = self.built_for(params)
        expected = f"the state of bridge.optimizer({type(self.optimizer).__name__})"
        is_of_kind = isinstance(state, KerasOptState) and state.kind == kind_of(built.optimizer)
        require(is_of_kind, "opt_state", expected, state, "Pass what init(params) returned.")
        old_values = list(map(jnp.asarray, built.to_values(state)))
        grads = built.in_order(updates)
        old_params = list(map(jnp.asarray, built.in_order(params)))
        if isinstance(self.optimizer, keras.optimizers.LossScaleOptimizer):
            # Keras expects gradients of the scaled loss and divides them by its scale. The scale is
            # a power of 2, so that no bit is lost.
            scale = old_values[built.roles.index(Role("loss_scale/dynamic_scale"))]
            grads = [g * scale.astype(g.dtype) for g in grads]
        new_params, new_values = built.optimizer.stateless_apply(old_values, grads, old_params)
        # Keras may change dtypes, but a state that is scanned over must keep them.
        new_values = [jnp.asarray(x, v.dtype) for x, v in zip(new_values, old_values, strict=True)]
        new_updates = list(map(update_to, new_params, old_params))
        return built.to_tree(new_updates), built.to_state(new_values, self._constraints)

    def built_for(self, params: PyTree) -> _Built:
        """Returns the optimizer built for params like these, and caches it."""
        key = _tree.signature(params)

        def build(params: PyTree) -> None:
            self._built[key] = self._build(params)[0]

        if key not in self._built:
            # Abstract evaluation: the initial values are not needed here.
            jax.eval_shape(build, params)
        return self._built[key]

    def _build(self, params: PyTree) -> tuple[_Built, list[Any]]:
        """Returns a copy of the optimizer, built for params, and the values of its variables."""
        leaves: dict[Path, Any] = {}
        for path, leaf in jax.tree_util.tree_leaves_with_path(params):
            leaves[_tree.keys(path)] = leaf
        model_variables: dict[Path, Any] = dict.fromkeys(leaves)
        if self.model is not None:
            # In Keras's order.
            layout = _variables.layout_of_state(self.model, params)
            model_variables = _variables.select_present(layout.params, params, "params")
        with keras_private.variables.outside_scopes():
            # Keras optimizers are built for variables, not params. A stand-in has the value of a
            # param and, if there is a model, the attributes of the model's variable.
            stand_ins = [_stand_in(path, leaves[path], v) for path, v in model_variables.items()]
            copy = _copy_unbuilt(self.optimizer)
            copy.build(stand_ins)
            values = [v.value for v in copy.variables]
        # The copy is kept: its variables must hold neither tracers nor memory.
        variables = [*copy.variables, *stand_ins]
        keras_private.variables.write(variables, [None] * len(variables))
        leaf_index = dict(zip(leaves, range(len(leaves)), strict=True))
        # For each stand-in, the index of its leaf in the params.
        order = [leaf_index[path] for path in model_variables]
        roles = roles_of_variables(copy, stand_ins)
        return _Built(copy, roles, order, jax.tree.structure(params)), values


def _stand_in(path: Path, value: Any, model_variable: Any) -> Any:
    """Returns a variable with the attributes of a model's variable that optimizers may read."""
    parts = (path or ("param",)) if model_variable is None else model_variable.path.split("/")
    # The names of Keras variables cannot contain a slash. Keras would number an empty one.
    *levels, name = (part.replace("/", ">") or "_" for part in parts)
    with name_scopes(levels):
        variable = keras.Variable(jnp.asarray(value), dtype=str(jnp.result_type(value)), name=name)
    if model_variable is not None:
        variable.constraint = model_variable.constraint
    return variable


def _copy_unbuilt(optimizer: Any) -> Any:
    """Returns an unbuilt optimizer of the same class and settings.

    Loss scaling is removed, except that of a `LossScaleOptimizer`: see `bridge.optimizer`.

    Raises:
      ValueError: The optimizer excludes variables from weight decay by identity.
    """
    if isinstance(optimizer, keras.optimizers.LossScaleOptimizer):
        return type(optimizer)(
            _copy_unbuilt(optimizer.inner_optimizer),
            initial_scale=optimizer.initial_scale,
            dynamic_growth_steps=optimizer.dynamic_growth_steps,
            name=optimizer.name,
        )
    if isinstance(optimizer, keras.optimizers.MultiOptimizer):
        return _copy_multi_optimizer(optimizer)
    settings = keras_private.optimizers.settings(optimizer)
    copy = type(optimizer).from_config({**settings, "loss_scale_factor": None})
    # `get_config` leaves the variables out that do not decay.
    ids, pattern = keras_private.optimizers.excluded_from_weight_decay(optimizer)
    expected = "names of variables without weight decay: exclude_from_weight_decay(var_names=[...])"
    require(not ids, "keras_optimizer", expected, f"{len(ids)} in var_list=")
    if pattern:
        copy.exclude_from_weight_decay(var_names=[pattern])
    return copy


def _copy_multi_optimizer(optimizer: Any) -> Any:
    optimizer_map = keras_private.optimizers.optimizer_map(optimizer)
    # Cached, so that an optimizer for several paths is copied once.
    copy_inner = functools.cache(_copy_unbuilt)
    if not isinstance(optimizer_map, keras.optimizers.OptimizerMap):
        return type(optimizer)(lambda v: copy_inner(optimizer_map(v)), name=optimizer.name)
    by_path = {path: copy_inner(optimizer_map[path]) for path in optimizer_map}
    default = copy_inner(optimizer_map.default_optimizer)
    new_map = keras.optimizers.OptimizerMap(default, by_path)
    return type(optimizer)(new_map, name=optimizer.name)
