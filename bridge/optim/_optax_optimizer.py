"""An optax transformation as a Keras optimizer, for `model.compile`."""

import re
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import keras
import numpy as np
import optax

from bridge import keras_private
from bridge.model._names import Path, variable_paths
from bridge.model._variables import at, nest
from bridge.optim._schedules import FILES, require_takes, schedule
from bridge.optim._slots import Role, roles_of_leaves
from functrain.internal import PyTree, argument_advice, brief, check_tx
from functrain.internal import tree as _tree

_OWNER = "bridge.OptaxOptimizer"
_TAKES = (
    f"{_OWNER}: expected a function that makes a transformation, with its arguments by name: "
    "OptaxOptimizer(optax.adam, learning_rate=1e-3), or a schedule as learning_rate"
)
_NUMBER = int | float | jax.Array | np.number | np.ndarray


class Plan(NamedTuple):
    """How a state of optax lies in the variables of an optimizer.

    Attributes:
      trained: The model's variables, by their paths in the params that the transformation sees.
      treedef: The structure of its state.
      slots: The optimizer's variables, one for each leaf.
      impls: What `key_impl` says of each leaf.
    """

    trained: dict[Path, Any]
    treedef: Any
    slots: list[Any]
    impls: list[Any]

    def params(self) -> PyTree:
        """Returns the params that the variables hold now."""
        return nest({path: v.value for path, v in self.trained.items()})

    def state(self) -> PyTree:
        """Returns the state that the variables hold now."""
        return self.treedef.unflatten(
            from_numbers(v.value, impl) for v, impl in zip(self.slots, self.impls, strict=True)
        )


@keras.saving.register_keras_serializable(package="bridge")
class OptaxOptimizer(keras_private.optimizers.GradientsOnly):
    """An optax transformation as a Keras optimizer: ``model.compile(OptaxOptimizer(...))``.

    It works in Keras's own `fit` and in `bridge.fit`. Each update is
    ``optax.apply_updates(params, tx.update(grads, opt_state, params)[0])``, to the bit. The params
    are nested dicts of the model's trainable variables, by `variable.path` without the model's
    name, so that masks and label functions of `optax.multi_transform` see
    ``{"dense": {"bias": ..., "kernel": ...}}``. Constraints are kept, as by all Keras optimizers.

    There are two forms. ``OptaxOptimizer(optax.adam, learning_rate=1e-3)`` takes what makes the
    transformation: a number as `learning_rate` is then injected into the state, so that
    LearningRateScheduler and ReduceLROnPlateau change it, and the model can be saved whole where
    the function is optax's or registered with `keras.saving.register_keras_serializable`.
    ``OptaxOptimizer(tx)`` takes a ready-made one. It has a `learning_rate` where one was injected,
    and the model's weights can be saved (`save_weights`, with the optimizer's state), but not the
    model, since a closure cannot be written to a file.

    Args:
      tx: A transformation, or a function that makes one.
      name: Name of the optimizer.
      **arguments: For the function. A schedule may be optax's or Keras's.

    Attributes:
      tx: The transformation.
      opt_state: Its state, as optax has it; read only.

    Raises:
      TypeError: `tx` is neither; or (when built, before the first step) its update needs more
        than gradients and params, as those of L-BFGS, `polyak_sgd`, `momo`, `sophia` and
        `optax.contrib.sam` in its opaque mode do.
      ValueError: (when the model is saved) a function has no name that a file could give.

    Examples:
      >>> import keras, numpy as np, optax
      >>> model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
      >>> model.compile(OptaxOptimizer(optax.adan, learning_rate=0.5), "mse")
      >>> history = model.fit(np.ones((64, 3)), np.ones((64, 1)), epochs=5, verbose=0)
      >>> history.history["loss"][-1] < history.history["loss"][0]
      True
      >>> float(model.optimizer.learning_rate)
      0.5
    """

    @argument_advice(
        "Arguments of a function go by name: OptaxOptimizer(optax.adam, learning_rate=1e-3)."
    )
    def __init__(
        self,
        tx: optax.GradientTransformation | Callable[..., optax.GradientTransformation],
        *,
        name: str | None = None,
        **arguments: Any,
    ) -> None:
        # The property of the same name takes its place; a number would become a variable.
        super().__init__(learning_rate=lambda: 0.0, name=name)
        made = _made(tx, arguments)
        # Past Keras's tracking of attributes, which would put its own containers in their place.
        self.__dict__.update(_made_by=tx, _arguments=arguments, tx=made, _saved_paths=[])

    def __repr__(self) -> str:
        given = ", ".join(f"{name}={brief(x)}" for name, x in self._arguments.items())
        return f"OptaxOptimizer({', '.join(filter(None, [brief(self._made_by), given]))})"

    def build(self, variables: list[Any]) -> None:
        """Makes variables for the state of the transformation."""
        if self.built:
            return
        super().build(variables)
        trained = self._by_path([v for v in variables if not v.overwrite_with_gradient])
        params = nest({path: v.value for path, v in trained.items()})
        state = _tree.copy(self.tx.init(params))
        _require_no_more_than_gradients(self.tx, params, state)
        leaves, treedef = jax.tree.flatten(state)
        roles = roles_of_leaves(state, {path: i for i, path in enumerate(trained)})
        # A file knows slots by their order, which must not depend on how Keras named layers.
        order = sorted(range(len(leaves)), key=lambda i: (roles[i].name, roles[i].owner or 0))
        made = {i: self._slot(leaves[i], roles[i], [*trained.values()]) for i in order}
        slots = [made[i] for i in range(len(leaves))]
        self.__dict__["_plan"] = Plan(trained, treedef, slots, [*map(key_impl, leaves)])

    def _by_path(self, trained: list[Any]) -> dict[Path, Any]:
        """Returns variables by the paths of the file that the optimizer comes from, or new ones.

        Keras names the layers of nested models otherwise when it loads them.
        """
        paths = variable_paths(trained)
        saved = [(path[-1], tuple(shape)) for path, shape in self._saved_paths]
        if saved == [(v.path.split("/")[-1], tuple(v.shape)) for v in trained]:
            paths = [tuple(path) for path, _ in self._saved_paths]
        return dict(zip(paths, trained, strict=True))

    def _slot(self, leaf: jax.Array, role: Role, trained: list[Any]) -> Any:
        value = numbers(leaf)
        owner = None if role.owner is None else trained[role.owner]
        is_alike = owner is not None and tuple(owner.shape) == value.shape
        names = [owner.path, role.name] if owner is not None else [role.name]
        return self.add_variable(
            shape=value.shape,
            initializer=lambda shape, dtype: value,
            dtype=str(value.dtype),
            layout=keras_private.variables.layout(owner) if is_alike else None,
            name="_".join(names).replace("/", "_"),
        )

    @property
    def plan(self) -> Plan:
        """How the state lies in this optimizer's variables."""
        if not self.built:
            raise ValueError(
                f"{_OWNER} {self.name!r} has not been built, which `fit` does, or "
                "optimizer.build(model.trainable_variables)."
            )
        return self.__dict__["_plan"]  # type: ignore[no-any-return]

    @property
    def opt_state(self) -> PyTree:
        """The state of the transformation, as it is now."""
        return self.plan.state()

    def update_all(self, grads: list[Any], variables: list[Any]) -> None:
        """Takes one update, of all variables that have gradients."""
        plan = self.plan
        given = dict(zip(map(id, variables), grads, strict=True))
        all_grads = {
            path: given.get(id(v), jnp.zeros_like(v.value)) for path, v in plan.trained.items()
        }
        params = plan.params()
        updates, state = self.tx.update(nest(all_grads), plan.state(), params)
        new = optax.apply_updates(params, updates)
        for path, variable in plan.trained.items():
            if id(variable) in given:
                variable.assign(at(new, path))
        for variable, leaf in zip(plan.slots, jax.tree.leaves(state), strict=True):
            variable.assign(numbers(leaf))

    @property
    def follows_schedule(self) -> bool:
        """Whether `learning_rate` is a schedule's, and cannot be set."""
        return callable(self._arguments.get("learning_rate"))

    @property
    def learning_rate(self) -> Any:
        """The variable with the injected learning rate, or what a schedule says now."""
        given = self._arguments.get("learning_rate")
        if callable(given):
            return _as_optax(given)(self.iterations.value)
        if not self.built and given is not None:
            return jnp.asarray(given, jnp.float32)
        return self._rate(AttributeError)

    @learning_rate.setter
    def learning_rate(self, value: Any) -> None:
        if callable(value) or self.follows_schedule:
            raise TypeError(
                f"{_OWNER}: learning_rate can be set from a number to a number, not from or to a "
                f"schedule; got {value!r}. Compile with a new optimizer instead."
            )
        if not self.built and "learning_rate" in self._arguments:
            self.__dict__["_arguments"] = {**self._arguments, "learning_rate": float(value)}
            self.__dict__["tx"] = _made(self._made_by, self._arguments)
        else:
            self._rate(TypeError).assign(value)

    def _rate(self, error: type[Exception]) -> Any:
        """Returns the variable that holds the one injected learning rate."""
        state = self.plan.treedef.unflatten(self.plan.slots) if self.built else ()
        found = optax.tree.get_all_with_path(state, "learning_rate")
        variables = [rate for _, rate in found if isinstance(rate, keras.Variable)]
        if len(variables) == len(found) == 1:
            return variables[0]
        where = [jax.tree_util.keystr(path) for path, _ in found]
        raise error(
            f"{_OWNER} {self.name!r} has no single learning rate that could be read or set: "
            f"expected one number injected into the state, found {where or 'none'}. Pass what "
            "makes the transformation, bridge.OptaxOptimizer(optax.adam, learning_rate=1e-3), or "
            "inject it: optax.inject_hyperparams(optax.adam)(learning_rate=1e-3)."
        )

    def get_config(self) -> dict[str, Any]:
        """Returns names and numbers only, for a file.

        Raises:
          ValueError: The transformation was passed ready-made, or an argument is a closure.
        """
        arguments = dict(self._arguments)
        if isinstance(arguments.get("learning_rate"), _NUMBER):
            arguments["learning_rate"] = float(self.learning_rate)
        trained = self.plan.trained if self.built else {}
        return {
            "name": self.name,
            "tx": FILES.name_of(self._made_by, _OWNER),
            "arguments": FILES.encode_arguments(arguments, _OWNER),
            "variables": [[list(path), list(v.shape)] for path, v in trained.items()],
        }

    @classmethod
    def from_config(
        cls, config: dict[str, Any], custom_objects: Mapping[str, Any] | None = None
    ) -> "OptaxOptimizer":
        """Returns the optimizer that `get_config` described, without its state."""
        with keras.saving.custom_object_scope(custom_objects or {}):
            arguments = FILES.decode_arguments(config["arguments"])
            made = cls(FILES.named(config["tx"]), name=config["name"], **arguments)
        made.__dict__["_saved_paths"] = config["variables"]
        return made


def _made(tx: Any, arguments: Mapping[str, Any]) -> optax.GradientTransformation:
    """Returns the transformation, with a learning rate that is a number injected into its state."""
    if callable(getattr(tx, "init", None)) and callable(getattr(tx, "update", None)):
        if arguments:
            raise TypeError(
                f"{_OWNER}: got a ready-made transformation and arguments, {sorted(arguments)}. "
                "They go with a function that makes one: OptaxOptimizer(optax.adam, b1=0.8)."
            )
        return tx
    if not callable(tx):
        is_keras = isinstance(tx, keras.optimizers.Optimizer)
        hint = " Keras takes it as it is: model.compile(optimizer)." if is_keras else ""
        raise TypeError(
            f"{_OWNER}: expected an optax transformation, such as optax.adam(1e-3), or a function "
            f"that makes one and its arguments, got {brief(tx)}.{hint}"
        )
    given = {key: _as_optax(value) for key, value in arguments.items()}
    require_takes(tx, _TAKES, **given)

    def of_rate(learning_rate: Any) -> optax.GradientTransformation:
        return tx(**{**given, "learning_rate": learning_rate})

    rate: Any = given.get("learning_rate")
    is_number = isinstance(rate, _NUMBER)
    made = optax.inject_hyperparams(of_rate)(float(rate)) if is_number else tx(**given)
    check_tx(made)
    return made


def _as_optax(value: Any) -> Any:
    is_keras = isinstance(value, keras.optimizers.schedules.LearningRateSchedule)
    return schedule(value) if is_keras else value


def numbers(leaf: jax.Array) -> jax.Array:
    """Returns what a variable can hold of a leaf."""
    return jax.random.key_data(leaf) if _tree.is_key(leaf) else leaf


def key_impl(leaf: jax.Array) -> Any:
    """Returns how a PRNG key is made of `numbers`; None for a leaf that is no key."""
    return jax.random.key_impl(leaf) if _tree.is_key(leaf) else None


def from_numbers(value: jax.Array, impl: Any) -> jax.Array:
    """Returns the leaf with these `numbers` and this `key_impl`."""
    return value if impl is None else jax.random.wrap_key_data(value, impl=impl)


def _require_no_more_than_gradients(tx: Any, params: PyTree, state: PyTree) -> None:
    """Refuses, before any training, what a Keras optimizer cannot give.

    Raises:
      TypeError: `update` needs more than gradients and params.
    """
    try:
        jax.eval_shape(tx.update, params, state, params)
    except (TypeError, ValueError) as error:
        missing = re.findall(
            r"missing \d+ required keyword-only arguments?: (.*)|(\w+) must be provided", str(error)
        )
        if not missing:
            raise
        raise TypeError(
            f"{_OWNER}: this transformation needs more than gradients and params: "
            f"{''.join(missing[0])}. Keras gives an optimizer nothing else. A loop of yours can: "
            "bridge.create_state(model, tx), then functrain.train_step(loss_fn, tx), which passes "
            "value, grad, value_fn and grad_fn (what else it needs, pass to tx.update), then "
            "bridge.to_keras(state, model)."
        ) from error
