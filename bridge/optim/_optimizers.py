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
from bridge.optim._constraints import ConstraintState, constraints, update_to
from bridge.optim._optax_optimizer import OptaxOptimizer
from bridge.optim._slots import KerasOptState, Role, kind_of, roles_of_variables
from functrain.internal import PyTree, require, require_instance, with_any_extra_args
from functrain.internal import tree as _tree


def optimizer(
    keras_optimizer: Any, *, model: keras.Layer | None = None
) -> optax.GradientTransformationExtraArgs:
    """Returns a Keras optimizer as an optax transformation.

    The transformation runs Keras's own code on any pytree of params, under jit, scan and vmap. This
    includes weight decay and its exclusions, clipping, EMA with overwriting, gradient accumulation
    and schedules. All slots equal Keras's to the bit. Params equal Keras's to the bit if they keep
    their sign and at least half of their size; otherwise there may be no update that leads exactly
    to the params that Keras assigns. In all cases ``params + updates`` is within
    ``2 * eps * max(|old|, |new|)`` of them: one rounding comes from the subtraction, the other from
    the compiler, which may fuse it with Keras's last operation.

    The names in Muon's `exclude_layers` and in an OptimizerMap are matched against the paths of the
    params, or with `model` against the paths of its variables. Those in
    `exclude_from_weight_decay(var_names=...)` are matched against the last part of a path only, as
    in Keras: "kernel", not the name of a layer. `var_list=` is refused.

    Gradients must be those of the unscaled loss, and `loss_scale_factor` is ignored. A
    LossScaleOptimizer skips updates that would overflow at its scale; to scale the loss before it
    is differentiated, use `functrain.tx.loss_scale`.

    With `use_ema` the average is ``opt_state.slots["model_variables_moving_average"]``. Keras
    assigns it to the model at the end of `fit`; here you have to do that yourself.

    Args:
      keras_optimizer: Any `keras.optimizers.Optimizer`. It is copied now and never changed. The
        slots of an optimizer that has been built are not part of ``init(params)``, which returns
        initial slots: see `bridge.create_state`.
      model: The model whose params, as `bridge.create_state` returns them, will be trained: all of
        them, or those that `optax.masked` or `optax.multi_transform` selects. With a model, updates
        apply the constraints of its variables.

    Returns:
      The transformation. Its state is a `KerasOptState(scalars, slots)`, and its `update` needs
      params.

    Raises:
      TypeError: `keras_optimizer` is not a Keras optimizer. From `update`: its learning rate is an
        optax schedule, which `bridge.schedule` converts.
      ValueError: It excludes variables from weight decay by `var_list=`. From `update`: params are
        missing, or gradients or state do not match them.

    Examples:
      >>> import jax.numpy as jnp, keras, optax
      >>> tx = optimizer(keras.optimizers.SGD(0.5, momentum=0.9))
      >>> params = {"w": jnp.ones(3)}
      >>> state = tx.init(params)
      >>> updates, state = tx.update({"w": jnp.ones(3)}, state, params)
      >>> print(optax.apply_updates(params, updates)["w"])
      [0.5 0.5 0.5]
      >>> sorted(state.slots)
      ['momentums']
    """
    expected = "a keras.optimizers.Optimizer, such as keras.optimizers.get('adam')"
    require_instance("keras_optimizer", keras_optimizer, keras.optimizers.Optimizer, expected)
    if not isinstance(inner_optimizer(keras_optimizer), OptaxOptimizer):
        # Keras's code applies the constraints itself.
        return _with_origin(Wrapped(keras_optimizer, model), keras_optimizer)
    tx = inner_optimizer(keras_optimizer).tx
    if model is not None and any(v.constraint for v in model.trainable_variables):
        tx = optax.chain(tx, constraints(model))
    return _with_origin(tx, keras_optimizer)


def origin(tx: Any) -> Any:
    """Returns the Keras optimizer that `optimizer` converted to a transformation, or None."""
    return getattr(tx.init, "keras_optimizer", None)


def _with_origin(tx: Any, keras_optimizer: Any) -> optax.GradientTransformationExtraArgs:
    def init(params: PyTree) -> PyTree:
        return tx.init(params)

    # A transformation is a tuple of functions without attributes, but a function can have one.
    init.keras_optimizer = keras_optimizer  # type: ignore[attr-defined]
    return optax.GradientTransformationExtraArgs(init, with_any_extra_args(tx).update)


def inner_optimizer(optimizer: Any) -> Any:
    """Returns the optimizer in a LossScaleOptimizer, or the optimizer itself."""
    return getattr(optimizer, "inner_optimizer", optimizer)


def step_counter(optimizer: Any) -> Any:
    """Returns the variable that counts steps.

    The public `iterations` is that count divided by the steps of gradient accumulation.
    """
    return inner_optimizer(optimizer).variables[0]


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
        leaves = _variables.leaves_by_path(params)
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
