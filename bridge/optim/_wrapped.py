"""A Keras optimizer as an optax transformation: Keras's own arithmetic, on any pytree of params."""

import contextlib
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import keras

from bridge import keras_private
from bridge.model import _variables
from bridge.model._scope import name_scopes
from bridge.optim._arithmetic import difference
from bridge.optim._constraints import ConstraintState
from bridge.optim._optimizer_copy import copied
from bridge.optim._slots import KerasOptState, Slot, SlotLayout, sort
from functrain.internal import PyTree
from functrain.internal import tree as _tree


class Wrapped:
    """What `bridge.optimizer` returns the `init` and `update` of."""

    def __init__(self, optimizer: Any, model: keras.Layer | None) -> None:
        self.optimizer = optimizer
        self.model = model
        self._built: dict[Any, SlotLayout] = {}
        self._own = {id(v): v for v in model.trainable_variables} if model is not None else {}
        _require_own(optimizer, self._own, model)
        self._template = copied(optimizer, self._own.get)  # as it is now, whatever becomes of it

    def init(self, params: PyTree) -> KerasOptState:
        """Returns the state before the first update, by the optimizer's own `build`."""
        built, values = self._build(params)
        leaves = jax.tree.leaves(params)
        owner = dict(zip(built.places, leaves, strict=True))
        values = [
            _placed(value, owner[role.owner]) if isinstance(role, Slot) else value
            for role, value in zip(built.roles, values, strict=True)
        ]
        return self._state(built, values)

    def update(
        self,
        updates: PyTree,
        state: KerasOptState,
        params: PyTree = None,
        *,
        loss_scale: Any = None,
        **extra_args: Any,
    ) -> tuple[PyTree, KerasOptState]:
        """Returns what to add to the params, and the new state."""
        del extra_args
        _require(updates, params)
        built = self.built_for(params)
        old = self.variables(built, state)
        leaves, grads = jax.tree.leaves(params), jax.tree.leaves(updates)
        in_order = [jnp.asarray(x) for x in _permuted(leaves, built.places)]
        scaled = self._scaled(built, old, _permuted(grads, built.places), loss_scale)
        new, variables = built.optimizer.stateless_apply(old, scaled, in_order)
        variables = [jnp.asarray(x, v.dtype) for x, v in zip(variables, old, strict=True)]
        deltas = [difference(n, p) for n, p in zip(new, in_order, strict=True)]
        new_updates = built.treedef.unflatten(deltas[i] for i in built.places)
        return new_updates, self._state(built, variables)

    def _scaled(
        self, built: SlotLayout, old: list[Any], grads: list[Any], loss_scale: Any
    ) -> list[Any]:
        """Returns gradients of the loss, times the scale that the optimizer divides them by."""
        if loss_scale is not None:
            grads = [g / loss_scale for g in grads]
        if isinstance(self.optimizer, keras.optimizers.LossScaleOptimizer):
            scale = old[built.roles.index("loss_scale/dynamic_scale")]
            grads = [g * scale.astype(g.dtype) for g in grads]  # a power of 2: no bit is lost
        return grads

    def _state(self, built: SlotLayout, values: list[Any]) -> KerasOptState:
        return built.gather(values, None if self.model is None else ConstraintState())

    def variables(self, built: SlotLayout, state: Any) -> list[Any]:
        if isinstance(state, KerasOptState):
            with contextlib.suppress(KeyError, ValueError):
                return [jnp.asarray(x) for x in built.scatter(state)]
        slots = sorted({role.name for role in built.roles if isinstance(role, Slot)})
        raise ValueError(
            f"opt_state: expected one of bridge.optimizer({type(self.optimizer).__name__}) with "
            f"slots {slots} for these params, got {jax.tree.structure(state)}. Take the state "
            "that this transformation's init(params) returned."
        )

    def built_for(self, params: PyTree) -> SlotLayout:
        leaves, treedef = jax.tree.flatten(params)
        key = treedef, tuple((x.shape, jnp.result_type(x)) for x in map(jnp.asarray, leaves))
        if key not in self._built:
            specs = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), params)

            def build(params: PyTree) -> list[Any]:
                self._built[key], values = self._build(params)
                return values

            jax.eval_shape(build, specs)
        return self._built[key]

    def _build(self, params: PyTree) -> tuple[SlotLayout, list[Any]]:
        """Returns a copy of the optimizer, built for params, and its variables' values."""
        leaves, treedef = jax.tree.flatten(params)
        paths, owners, places = self._places(params)
        with keras_private.variables.outside_scopes():
            stand_ins = list(map(_stand_in, paths, leaves, owners))
            known: dict[Any, Any] = dict(self._own)  # what stays are those masked out
            known.update(zip(map(id, owners), stand_ins, strict=True))
            copy = copied(self._template, known.get)
            in_order = _permuted(stand_ins, places)
            copy.build(in_order)
            values = [v.value for v in copy.variables]
        for variable in (*copy.variables, *stand_ins):
            keras_private.variables.swap_value(variable, None)
        return SlotLayout(copy, sort(copy, in_order), places, treedef), values

    def _places(self, params: PyTree) -> tuple[list[Any], list[Any], list[int]]:
        """Returns each leaf's path, variable if known, and place in the order of the optimizer."""
        paths = [_tree.keys(path) for path, _ in jax.tree_util.tree_leaves_with_path(params)]
        if self.model is None:
            return [path or ("param",) for path in paths], [None] * len(paths), [*range(len(paths))]
        held = _variables.fitting(_variables.layout(self.model).params, params, "params")
        order = {path: i for i, path in enumerate(held)}
        owners = [held[path] for path in paths]
        return [v.path.split("/") for v in owners], owners, [order[path] for path in paths]


def _stand_in(path: Sequence[str], value: Any, owner: Any) -> Any:
    """Returns a variable with what a Keras optimizer may ask of one."""
    *levels, name = (part.replace("/", ">") or "_" for part in path)
    with name_scopes(levels):
        variable = keras.Variable(jnp.asarray(value), dtype=str(jnp.result_type(value)), name=name)
    if owner is not None:
        variable.constraint = owner.constraint
        variable.overwrite_with_gradient = owner.overwrite_with_gradient
    return variable


def _permuted(items: list[Any], places: list[int]) -> list[Any]:
    """Returns the items, each at its place."""
    return [item for _, item in sorted(zip(places, items, strict=True), key=lambda pair: pair[0])]


def _placed(value: Any, param: Any) -> Any:
    """Puts a slot where its parameter is."""
    traced = any(isinstance(x, jax.core.Tracer) for x in (value, param))
    arrays = isinstance(value, jax.Array) and isinstance(param, jax.Array)
    if traced or not arrays or value.shape != param.shape or value.sharding == param.sharding:
        return value
    return jax.device_put(value, param.sharding)


def _require_own(optimizer: Any, own: dict[int, Any], model: keras.Layer | None) -> None:
    if model is None:
        by_function = isinstance(optimizer, keras.optimizers.MultiOptimizer) and not isinstance(
            keras_private.optimizers.optimizer_map(optimizer), keras.optimizers.OptimizerMap
        )
        if by_function:
            raise ValueError(
                "a MultiOptimizer that chooses by a function of a variable needs variables. Pass "
                "their model, bridge.optimizer(optimizer, model=model), or use an OptimizerMap."
            )
    elif optimizer.built and set(map(id, keras_private.optimizers.trained(optimizer))) != set(own):
        raise ValueError(
            f"optimizer {optimizer.name!r} was built for other variables than those that "
            f"{model.name!r} trains now. Use a new one: type(optimizer).from_config("
            "optimizer.get_config()). If layers were frozen or unfrozen, compile the model again."
        )


def _require(updates: PyTree, params: PyTree) -> None:
    if params is None:
        raise ValueError(
            "bridge.optimizer: update needs the params, since Keras returns new params, not "
            "updates: tx.update(grads, opt_state, params)."
        )
    lines = _tree.differences(*(jax.tree.map(_shape, tree) for tree in (params, updates)))
    if lines:
        raise ValueError(
            f"gradients: expected the structure and the shapes of params, got\n"
            f"{_tree.bullets(lines)}\nTake the gradient with respect to these params."
        )


def _shape(x: Any) -> Any:
    return jax.ShapeDtypeStruct(jnp.shape(x), jnp.float32)
