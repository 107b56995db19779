"""An optax transformation as a Keras optimizer, for `model.compile`."""

import dataclasses
import re
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import keras
import numpy as np
import optax

from bridge import keras_private
from bridge.model._variables import nest, select
from bridge.optim import _factory
from bridge.optim._labels import Label, labels, paths
from bridge.optim._schedules import schedule
from functrain.internal import PyTree, advised, brief, check_tx
from functrain.internal import tree as _tree

_OWNER = "bridge.OptaxOptimizer"
_TAKES = (
    f"{_OWNER}: expected a function that makes a transformation, with its arguments by name: "
    "OptaxOptimizer(optax.adam, learning_rate=1e-3), or a schedule as learning_rate"
)
_NUMBER = int | float | jax.Array | np.number | np.ndarray


@dataclasses.dataclass(frozen=True)
class Plan:
    """How a state of optax lies in the variables of an optimizer.

    Attributes:
      trained: The model's variables.
      paths: Their paths in the params that the transformation sees.
      treedef: The structure of its state.
      slots: The optimizer's variables, one for each leaf.
      labels: What each leaf is.
      impls: How keys are made of a leaf's numbers, where it is a PRNG key.
    """

    trained: tuple[Any, ...]
    paths: tuple[tuple[str, ...], ...]
    treedef: Any
    slots: tuple[Any, ...]
    labels: tuple[Label, ...]
    impls: tuple[Any, ...]

    def params(self, values: Mapping[int, Any]) -> PyTree:
        """Returns nested dicts of values by variable, as the transformation sees them."""
        return nest({p: values[id(v)] for p, v in zip(self.paths, self.trained, strict=True)})

    def state(self) -> PyTree:
        """Returns the state that the variables hold now."""
        return self.treedef.unflatten(
            v.value if impl is None else jax.random.wrap_key_data(v.value, impl=impl)
            for v, impl in zip(self.slots, self.impls, strict=True)
        )

    def assign(self, state: PyTree) -> None:
        """Writes a state into the variables."""
        for variable, leaf in zip(self.slots, jax.tree.leaves(state), strict=True):
            variable.assign(numbers(leaf))


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

    @advised("Arguments of a function go by name: OptaxOptimizer(optax.adam, learning_rate=1e-3).")
    def __init__(
        self,
        tx: optax.GradientTransformation | Callable[..., optax.GradientTransformation],
        *,
        name: str | None = None,
        **arguments: Any,
    ) -> None:
        super().__init__(learning_rate=_unknown, name=name)
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
        trained = tuple(v for v in variables if not v.overwrite_with_gradient)
        keys = self._paths(trained)
        params = nest({key: v.value for key, v in zip(keys, trained, strict=True)})
        state = _tree.copy(self.tx.init(params))
        _require_no_more_than_gradients(self.tx, params, state)
        leaves, treedef = jax.tree.flatten(state)
        marks = labels(state, {key: i for i, key in enumerate(keys)})
        # A file knows slots by their order, which must not depend on how Keras named layers.
        order = sorted(range(len(leaves)), key=lambda i: (marks[i].prefix, marks[i].owner or 0))
        made = {i: self._slot(leaves[i], marks[i], trained) for i in order}
        slots = tuple(made[i] for i in range(len(leaves)))
        impls = tuple(jax.random.key_impl(x) if _tree.is_key(x) else None for x in leaves)
        self.__dict__["_plan"] = Plan(trained, keys, treedef, slots, tuple(marks), impls)

    def _paths(self, trained: tuple[Any, ...]) -> tuple[tuple[str, ...], ...]:
        """Returns the paths of the file that the optimizer comes from, if they fit, or new ones.

        Keras names the layers of nested models otherwise when it loads them.
        """
        saved = [(path[-1], tuple(shape)) for path, shape in self._saved_paths]
        if saved == [(v.path.split("/")[-1], tuple(v.shape)) for v in trained]:
            return tuple(tuple(path) for path, _ in self._saved_paths)
        return tuple(paths(trained))

    def _slot(self, leaf: jax.Array, label: Label, trained: tuple[Any, ...]) -> Any:
        value = numbers(leaf)
        of = None if label.owner is None else trained[label.owner]
        near = of is not None and tuple(of.shape) == value.shape
        owner = [] if of is None else [of.path.replace("/", "_")]
        return self.add_variable(
            shape=value.shape,
            initializer=lambda shape, dtype: value,
            dtype=str(value.dtype),
            layout=keras_private.variables.layout(of) if near else None,
            name="_".join([*owner, *label.prefix]),
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
        old = {id(v): v.value for v in plan.trained}
        all_grads = {i: jnp.zeros_like(x) for i, x in old.items()}
        all_grads |= {id(v): g for v, g in zip(variables, grads, strict=True)}
        params = plan.params(old)
        updates, state = self.tx.update(plan.params(all_grads), plan.state(), params)
        found = select(optax.apply_updates(params, updates), plan.paths).values()
        new = dict(zip(map(id, plan.trained), found, strict=True))
        for variable in variables:
            variable.assign(new[id(variable)])
        plan.assign(state)

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
        plan = self.plan if self.built else None
        tree = plan.treedef.unflatten(range(len(plan.slots))) if plan else ()
        found = optax.tree.get_all_with_path(tree, "learning_rate")
        numbers = [place for _, place in found if isinstance(place, int)]
        if plan and len(numbers) == len(found) == 1:
            return plan.slots[numbers[0]]
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
            arguments["learning_rate"] = float(keras.ops.convert_to_numpy(self.learning_rate))
        known = zip(self.plan.paths, self.plan.trained, strict=True) if self.built else ()
        return {
            "name": self.name,
            "tx": _factory.name_of(self._made_by, _OWNER, "transformation"),
            "arguments": _factory.to_config(arguments, _OWNER),
            "variables": [[list(path), list(v.shape)] for path, v in known],
        }

    @classmethod
    def from_config(
        cls, config: dict[str, Any], custom_objects: Mapping[str, Any] | None = None
    ) -> "OptaxOptimizer":
        """Returns the optimizer that `get_config` described, without its state."""
        arguments = _factory.from_config(config["arguments"], custom_objects)
        made = cls(_factory.named(config["tx"], custom_objects), name=config["name"], **arguments)
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
        keras_s = isinstance(tx, keras.optimizers.Optimizer)
        raise TypeError(
            f"{_OWNER}: expected an optax transformation, such as optax.adam(1e-3), or a function "
            f"that makes one and its arguments, got {brief(tx)}."
            + " Keras takes it as it is: model.compile(optimizer)."
            * keras_s
        )
    given = {key: _as_optax(value) for key, value in arguments.items()}
    _factory.require_takes(tx, _TAKES, **given)

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


def _unknown() -> Any:
    raise AttributeError  # never called: `learning_rate` is overridden


def numbers(leaf: jax.Array) -> jax.Array:
    """Returns what a variable can hold of a leaf."""
    return jax.random.key_data(leaf) if _tree.is_key(leaf) else leaf


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
