"""A Keras optimizer as an optax transformation: Keras's own arithmetic, on any pytree of params."""

import contextlib
import functools
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import keras
import optax

from bridge import keras_private
from bridge.model import _variables
from bridge.model._names import Path
from bridge.model._scope import name_scopes
from bridge.optim._constraints import ConstraintState, difference
from bridge.optim._schedules import require_takes
from bridge.optim._slots import KerasOptState, Role, roles_of_variables
from functrain.internal import PyTree
from functrain.internal import tree as _tree

_RATE = (
    "learning_rate: expected a number, a Keras schedule or a function of nothing. Make an optax "
    "schedule, a function of the count, a Keras schedule: bridge.schedule(optax_schedule)"
)


class _Built(NamedTuple):
    """An optimizer that was built for params of one structure, and holds no values.

    Attributes:
      optimizer: The optimizer.
      roles: Those of `optimizer.variables`.
      order: For each parameter as the optimizer counts them, the number of its leaf.
      treedef: The structure of the params.
    """

    optimizer: Any
    roles: list[Role]
    order: list[int]
    treedef: Any

    def in_order(self, tree: PyTree) -> list[Any]:
        """Returns the leaves of a tree that is shaped like the params, as the optimizer counts."""
        leaves = self.treedef.flatten_up_to(tree)
        return [leaves[i] for i in self.order]

    def to_tree(self, values: list[Any]) -> PyTree:
        """Returns what `in_order` was given."""
        leaves = dict(zip(self.order, values, strict=True))
        return self.treedef.unflatten(leaves[i] for i in range(len(leaves)))

    def to_state(self, values: list[Any], constraints: Any) -> KerasOptState:
        """Returns values of `optimizer.variables` as a state."""
        scalars: dict[str, Any] = {}
        slots: dict[str, list[Any]] = {}
        for role, value in zip(self.roles, values, strict=True):
            if role.owner is None:
                scalars[role.name] = value
            else:
                nothing = [optax.MaskedNode()] * len(self.order)
                slots.setdefault(role.name, nothing)[role.owner] = value
        trees = {name: self.to_tree(slot) for name, slot in slots.items()}
        return KerasOptState(scalars, trees, constraints)

    def to_values(self, state: KerasOptState) -> list[Any]:
        """Returns a state as the values of `optimizer.variables`: `to_state`, backwards."""
        slots = {name: self.in_order(tree) for name, tree in state.slots.items()}
        return [
            state.scalars[name] if owner is None else slots[name][owner]
            for name, owner in self.roles
        ]


class Wrapped:
    """What `bridge.optimizer` returns the `init` and `update` of."""

    def __init__(self, optimizer: Any, model: keras.Layer | None) -> None:
        self.optimizer = optimizer
        self.model = model
        self._built: dict[Any, _Built] = {}
        self._own = {}
        if model is not None:
            _require_same_variables(optimizer, model)
            self._own = {id(v): v for v in model.trainable_variables}
        self._template = _copied(optimizer, self._own)  # as it is now, whatever becomes of it
        self._constraints = None if model is None else ConstraintState()

    def init(self, params: PyTree) -> KerasOptState:
        """Returns the state before the first update, by the optimizer's own `build`."""
        built, values = self._build(params)
        leaves = built.in_order(params)
        placed = [
            value if role.owner is None else _placed(value, leaves[role.owner])
            for role, value in zip(built.roles, values, strict=True)
        ]
        return built.to_state(placed, self._constraints)

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
        old, grads = self.values(built, state), built.in_order(updates)
        in_order = [jnp.asarray(x) for x in built.in_order(params)]
        if loss_scale is not None:
            grads = [g / loss_scale for g in grads]
        if isinstance(self.optimizer, keras.optimizers.LossScaleOptimizer):
            # It divides them by its scale, which is a power of 2, so that no bit is lost.
            scale = old[built.roles.index(Role("loss_scale/dynamic_scale"))]
            grads = [g * scale.astype(g.dtype) for g in grads]
        new, variables = built.optimizer.stateless_apply(old, grads, in_order)
        variables = [jnp.asarray(x, v.dtype) for x, v in zip(variables, old, strict=True)]
        deltas = [difference(n, p) for n, p in zip(new, in_order, strict=True)]
        return built.to_tree(deltas), built.to_state(variables, self._constraints)

    def values(self, built: _Built, state: Any) -> list[Any]:
        """Returns a state as the values of the variables of the optimizer that was built."""
        if isinstance(state, KerasOptState):
            with contextlib.suppress(KeyError, ValueError):
                return [jnp.asarray(x) for x in built.to_values(state)]
        slots = sorted({role.name for role in built.roles if role.owner is not None})
        raise ValueError(
            f"opt_state: expected one of bridge.optimizer({type(self.optimizer).__name__}) with "
            f"slots {slots} for these params, got {jax.tree.structure(state)}. Take the state "
            "that this transformation's init(params) returned."
        )

    def built_for(self, params: PyTree) -> _Built:
        """Returns the optimizer that was built for such params."""
        leaves, treedef = jax.tree.flatten(params)
        key = treedef, tuple((x.shape, jnp.result_type(x)) for x in map(jnp.asarray, leaves))
        if key not in self._built:

            def build(params: PyTree) -> list[Any]:
                self._built[key], values = self._build(params)
                return values

            jax.eval_shape(build, params)
        return self._built[key]

    def _build(self, params: PyTree) -> tuple[_Built, list[Any]]:
        """Returns a copy of the optimizer, built for params, and its variables' values."""
        leaves = {
            _tree.keys(path): leaf for path, leaf in jax.tree_util.tree_leaves_with_path(params)
        }
        owners = self._owners(params, leaves)
        with keras_private.variables.outside_scopes():
            stand_ins = [_stand_in(path, leaves[path], v) for path, v in owners.items()]
            known = dict(self._own)  # what stays are those masked out
            known.update(zip(map(id, owners.values()), stand_ins, strict=True))
            copy = _copied(self._template, known)
            copy.build(stand_ins)
            values = [v.value for v in copy.variables]
        for variable in (*copy.variables, *stand_ins):
            keras_private.variables.swap_value(variable, None)
        number = {path: i for i, path in enumerate(leaves)}
        order = [number[path] for path in owners]
        roles = roles_of_variables(copy, stand_ins)
        return _Built(copy, roles, order, jax.tree.structure(params)), values

    def _owners(self, params: PyTree, paths: Iterable[Path]) -> dict[Path, Any]:
        """Returns the model's variables, if it is known, in the order that Keras has them in."""
        if self.model is None:
            return dict.fromkeys(paths)
        return _variables.fitting(_variables.layout(self.model).params, params, "params")


def _stand_in(path: Path, value: Any, owner: Any) -> Any:
    """Returns a variable with what a Keras optimizer may ask of one."""
    parts = (path or ("param",)) if owner is None else owner.path.split("/")
    *levels, name = (part.replace("/", ">") or "_" for part in parts)
    with name_scopes(levels):
        variable = keras.Variable(jnp.asarray(value), dtype=str(jnp.result_type(value)), name=name)
    if owner is not None:
        variable.constraint = owner.constraint
        variable.overwrite_with_gradient = owner.overwrite_with_gradient
    return variable


def _copied(optimizer: Any, stand_ins: Mapping[int, Any]) -> Any:
    """Returns an unbuilt optimizer of the same class and settings, with a learning rate as it is.

    Loss scaling is left out but for `LossScaleOptimizer`: see `bridge.optimizer`.

    Args:
      optimizer: A Keras optimizer, built or not.
      stand_ins: What stands for variables that may be excluded from weight decay, by their ids.

    Raises:
      ValueError: Its settings do not say all of it: variables are excluded from weight decay by
        identity and `stand_ins` lacks them.
    """
    if isinstance(optimizer, keras.optimizers.LossScaleOptimizer):
        return type(optimizer)(
            _copied(optimizer.inner_optimizer, stand_ins),
            initial_scale=optimizer.initial_scale,
            dynamic_growth_steps=optimizer.dynamic_growth_steps,
            name=optimizer.name,
        )
    if isinstance(optimizer, keras.optimizers.MultiOptimizer):
        return _copied_multi(optimizer, stand_ins)
    rate = keras_private.optimizers.learning_rate(optimizer)
    settings = optimizer.get_config()
    if rate is not None:  # a schedule has no state: both may use it
        settings["learning_rate"] = rate
        if not isinstance(rate, keras.optimizers.schedules.LearningRateSchedule):
            require_takes(rate, _RATE)
    settings["loss_scale_factor"] = None
    copy = type(optimizer).from_config(settings)
    _exclude(optimizer, copy, stand_ins)
    return copy


def _copied_multi(optimizer: Any, stand_ins: Mapping[int, Any]) -> Any:
    chosen = keras_private.optimizers.optimizer_map(optimizer)
    copy_of = functools.cache(lambda inner: _copied(inner, stand_ins))
    if not isinstance(chosen, keras.optimizers.OptimizerMap):
        if not stand_ins:
            raise ValueError(
                "a MultiOptimizer that chooses by a function of a variable needs variables. Pass "
                "their model, bridge.optimizer(optimizer, model=model), or use an OptimizerMap."
            )
        return type(optimizer)(lambda v: copy_of(chosen(v)), name=optimizer.name)
    by_path = {path: copy_of(chosen[path]) for path in chosen}
    both = keras.optimizers.OptimizerMap(copy_of(chosen.default_optimizer), by_path)
    return type(optimizer)(both, name=optimizer.name)


def _exclude(optimizer: Any, copy: Any, stand_ins: Mapping[int, Any]) -> None:
    ids, pattern = keras_private.optimizers.excluded_from_weight_decay(optimizer)
    if not ids <= stand_ins.keys():
        raise ValueError(
            f"optimizer {optimizer.name!r} excludes variables from weight decay by identity "
            "(exclude_from_weight_decay(var_list=...)), and they are not known here. Pass their "
            "model, bridge.optimizer(optimizer, model=model), or exclude by name: var_names=[...]."
        )
    if ids or pattern:
        names = [pattern] if pattern else None
        copy.exclude_from_weight_decay(var_list=[stand_ins[i] for i in ids], var_names=names)


def _placed(value: Any, param: Any) -> Any:
    """Puts a slot where its parameter is."""
    are_arrays = _tree.is_concrete(value) and _tree.is_concrete(param)
    if not are_arrays or value.shape != param.shape or value.sharding == param.sharding:
        return value
    return jax.device_put(value, param.sharding)


def _require_same_variables(optimizer: Any, model: keras.Layer) -> None:
    trained = map(id, keras_private.optimizers.trained_variables(optimizer))
    if optimizer.built and set(trained) != set(map(id, model.trainable_variables)):
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
