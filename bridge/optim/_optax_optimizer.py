"""An optax transformation as a Keras optimizer, for `model.compile`."""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import keras
import numpy as np
import optax

from bridge import keras_private
from bridge.model._functions import find_function, name_of
from bridge.model._names import Path, unused_name
from bridge.model._variables import arrays, get_at, nest
from bridge.optim import _plain_data
from bridge.optim._schedules import schedule
from bridge.optim._slots import Role, from_plain_array, roles_of_leaves, to_plain_array
from functrain.internal import PyTree, check_tx, require
from functrain.internal import tree as _tree

_OWNER = "bridge.OptaxOptimizer"
# Settings of Keras's updates, which a transformation does not use.
_KERAS_SETTINGS = {
    "weight_decay",
    "clipnorm",
    "global_clipnorm",
    "clipvalue",
    "use_ema",
    "gradient_accumulation_steps",
}
_NUMBER = int | float | jax.Array | np.number | np.ndarray


class StateMapping(NamedTuple):
    """The mapping between an optax state and the variables of a Keras optimizer.

    Attributes:
      trained: The model's variables, by their paths in the params of the transformation.
      treedef: The structure of the optax state.
      slots: The optimizer's variables, one for each leaf of the state.
      keys: The first value of each leaf that is a PRNG key, None for each other.
    """

    trained: dict[Path, Any]
    treedef: Any
    slots: list[Any]
    keys: list[Any]

    def params(self) -> PyTree:
        """Returns the current values of the model's variables as params."""
        return arrays(self.trained)

    def state(self) -> PyTree:
        """Returns the current values of the optimizer's variables as an optax state."""
        values = [slot.value for slot in self.slots]
        return self.treedef.unflatten(map(from_plain_array, values, self.keys))


@keras.saving.register_keras_serializable(package="bridge")
class OptaxOptimizer(keras_private.optimizers.GradientsOnly):
    """An optax transformation as a Keras optimizer: ``model.compile(OptaxOptimizer(...))``.

    It works in Keras's own `fit` and in `bridge.fit`. Each update equals
    ``optax.apply_updates(params, tx.update(grads, opt_state, params)[0])`` to the bit. The params
    are nested dicts of the model's trainable variables, by Keras's `variable.path`. Masks, and
    label functions of `optax.multi_transform`, see ``{"dense": {"bias": ..., "kernel": ...}}`` of a
    Functional model. The paths of a Sequential or subclassed model begin with its name:
    ``{"sequential": {"dense": ...}}``. Constraints are applied, as by all Keras optimizers.

    There are two forms. ``OptaxOptimizer(optax.adam, learning_rate=1e-3)`` takes the function that
    creates the transformation. A number as `learning_rate` is then injected into the state, so
    that LearningRateScheduler and ReduceLROnPlateau can change it. The whole model can be saved if
    the function is optax's or registered with `keras.saving.register_keras_serializable`.
    ``OptaxOptimizer(tx)`` takes an existing transformation. It has a `learning_rate` if one was
    injected into its state. The weights of the model can be saved (`save_weights`, including the
    optimizer's state), but not the whole model, since a closure cannot be written to a file.

    Args:
      tx: A transformation, or a function that creates one.
      name: The name of the optimizer.
      **arguments: Arguments of the function. A schedule may be optax's or Keras's.

    Attributes:
      tx: The transformation.
      opt_state: The optax state of the transformation; read only.

    Raises:
      TypeError: `tx` is neither a transformation nor a function.
      TypeError or ValueError: (when the optimizer is built, before the first step) its update needs
        more than gradients and params, like those of L-BFGS, `polyak_sgd`, `momo`, `sophia` and
        `optax.contrib.sam` in its opaque mode.
      ValueError: (when the model is saved) a function has no name that a file can contain.

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

    def __init__(
        self,
        tx: optax.GradientTransformation | Callable[..., optax.GradientTransformation],
        *,
        name: str | None = None,
        **arguments: Any,
    ) -> None:
        # A function, since a number would become a variable. The property `learning_rate` below
        # replaces it.
        super().__init__(learning_rate=lambda: 0.0, name=name)
        transformation = _create_tx(tx, arguments)
        # Not by assignment: Keras tracks attributes and would replace dicts by its own containers.
        self.__dict__.update(_factory=tx, _arguments=arguments, tx=transformation, _saved_paths=[])

    def build(self, variables: list[Any]) -> None:
        """Creates variables for the state of the transformation."""
        if self.built:
            return
        # A transformation that is refused must not leave an optimizer that counts as built.
        with keras_private.optimizers.atomic_build(self):
            super().build(variables)
            self.__dict__["_mapping"] = self._create_slots(variables)

    def _create_slots(self, variables: list[Any]) -> StateMapping:
        # Keras assigns their gradients to float8 scales, without the optimizer.
        trained = self._by_path([v for v in variables if not v.overwrite_with_gradient])
        params = arrays(trained)
        # A copy: leaves of the state may share buffers with each other or with params.
        state = _tree.copy(self.tx.init(params))
        _require_gradients_suffice(self.tx, params, state)
        leaves, treedef = jax.tree.flatten(state)
        roles = roles_of_leaves(state, dict(zip(trained, range(len(trained)), strict=True)))
        # Keras's files identify variables by their order. Sorting by role makes it independent of
        # the names of layers, which determine the order of leaves in a dict.
        order = sorted(range(len(leaves)), key=lambda i: (roles[i].name, roles[i].owner or 0))
        slots: list[Any] = [None] * len(leaves)
        for i in order:
            slots[i] = self._add_slot(leaves[i], roles[i], list(trained.values()))
        keys = [leaf if _tree.is_key(leaf) else None for leaf in leaves]
        return StateMapping(trained, treedef, slots, keys)

    def _by_path(self, trained: list[Any]) -> dict[Path, Any]:
        """Returns variables by path.

        An optimizer that was loaded from a file uses the paths in the file, since Keras may give
        other names to the layers of nested models when it loads them.
        """
        # Two variables may have the same path, or one that is the beginning of another's.
        keras_paths = [tuple(variable.path.split("/")) for variable in trained]
        used = {path[:depth] for path in keras_paths for depth in range(1, len(path))}
        paths: list[Path] = []
        for *layers, name in keras_paths:
            siblings = {path[-1] for path in (*used, *paths) if list(path[:-1]) == layers}
            paths.append((*layers, unused_name(name, siblings)))
        saved = [(path[-1], tuple(shape)) for path, shape in self._saved_paths]
        if saved == [(v.path.split("/")[-1], tuple(v.shape)) for v in trained]:
            paths = [tuple(path) for path, _ in self._saved_paths]
        return dict(zip(paths, trained, strict=True))

    def _add_slot(self, leaf: jax.Array, role: Role, trained: list[Any]) -> Any:
        """Creates the variable for a leaf of the state."""
        value = to_plain_array(leaf)
        owner = None if role.owner is None else trained[role.owner]
        # A slot with the shape of its parameter is sharded like the parameter.
        has_owner_shape = owner is not None and tuple(owner.shape) == value.shape
        names = [owner.path, role.name] if owner is not None else [role.name]
        return self.add_variable(
            shape=value.shape,
            initializer=lambda shape, dtype: value,
            dtype=str(value.dtype),
            layout=keras_private.variables.layout(owner) if has_owner_shape else None,
            name="_".join(names).replace("/", "_"),
        )

    def exclude_from_weight_decay(self, var_list: Any = None, var_names: Any = None) -> None:
        """Raises ValueError: the transformation decides which params decay."""
        advice = "Pass mask=, a function of the params, to optax.adamw."
        name = f"{_OWNER}.exclude_from_weight_decay"
        require(False, name, "a mask in the transformation", var_list or var_names, advice)

    def __setattr__(self, name: str, value: Any) -> None:
        """Sets an attribute; raises ValueError for settings that would have no effect."""
        has_effect = name not in _KERAS_SETTINGS or value in (None, False)
        advice = "Let the transformation do it: optax.chain(optax.clip(1.0), ...)."
        require(has_effect, f"{_OWNER}.{name}", "None or False", value, advice)
        super().__setattr__(name, value)

    @property
    def mapping(self) -> StateMapping:
        """The mapping between the optax state and this optimizer's variables."""
        advice = "`fit` builds it, or optimizer.build(model.trainable_variables)."
        require(self.built, _OWNER, "a built optimizer", self.name, advice)
        return self.__dict__["_mapping"]  # type: ignore[no-any-return]

    @property
    def opt_state(self) -> PyTree:
        """The current state of the transformation."""
        return self.mapping.state()

    def update_all(self, grads: list[Any], variables: list[Any]) -> None:
        """Updates all variables that have gradients, and the state."""
        mapping = self.mapping
        grad_by_id = dict(zip(map(id, variables), grads, strict=True))
        # The transformation was initialized for all variables. Those without a gradient get zeros,
        # and are not assigned below.
        all_grads = {}
        for path, variable in mapping.trained.items():
            all_grads[path] = grad_by_id.get(id(variable), jnp.zeros_like(variable.value))
        params = mapping.params()
        updates, state = self.tx.update(nest(all_grads), mapping.state(), params)
        new_params = optax.apply_updates(params, updates)
        for path, variable in mapping.trained.items():
            if id(variable) in grad_by_id:
                variable.assign(get_at(new_params, path))
        for variable, leaf in zip(mapping.slots, jax.tree.leaves(state), strict=True):
            variable.assign(to_plain_array(leaf))

    @property
    def follows_schedule(self) -> bool:
        """True if `learning_rate` is a schedule, and cannot be set."""
        return callable(self._arguments.get("learning_rate"))

    @property
    def learning_rate(self) -> Any:
        """The variable with the injected learning rate, or the current value of a schedule."""
        argument = self._arguments.get("learning_rate")
        if callable(argument):
            return _to_optax(argument)(self.iterations.value)
        # Before the optimizer is built, there is no variable yet.
        if not self.built and argument is not None:
            return jnp.asarray(argument, jnp.float32)
        return self._rate_variable()

    @learning_rate.setter
    def learning_rate(self, value: Any) -> None:
        is_number = not (callable(value) or self.follows_schedule)
        expected = "a number, and an optimizer whose rate is not a schedule"
        advice = "Compile with a new optimizer instead."
        require(is_number, "learning_rate", expected, value, advice, error=TypeError)
        if not self.built and "learning_rate" in self._arguments:
            self.__dict__["_arguments"] = {**self._arguments, "learning_rate": float(value)}
            self.__dict__["tx"] = _create_tx(self._factory, self._arguments)
        else:
            self._rate_variable().assign(value)

    def _rate_variable(self) -> Any:
        """Returns the variable of the only injected learning rate.

        Raises:
          AttributeError: There is none, or more than one; `hasattr` expects this class.
        """
        state = self.mapping.treedef.unflatten(self.mapping.slots) if self.built else ()
        rates = optax.tree.get_all_with_path(state, "learning_rate")
        if len(rates) == 1 and isinstance(rates[0][1], keras.Variable):
            return rates[0][1]
        paths = [jax.tree_util.keystr(path) for path, _ in rates]
        raise AttributeError(
            f"{_OWNER} {self.name!r}: expected one learning rate in the state, got "
            f"{paths or 'none'}. Pass bridge.OptaxOptimizer(optax.adam, learning_rate=1e-3), or "
            "inject the rate: optax.inject_hyperparams(optax.adam)(learning_rate=1e-3)."
        )

    def get_config(self) -> dict[str, Any]:
        """Returns the optimizer as plain data for a file.

        Raises:
          ValueError: The optimizer was created from a transformation, or an argument is a closure.
        """
        arguments = dict(self._arguments)
        # The current rate, which callbacks may have changed.
        if isinstance(arguments.get("learning_rate"), _NUMBER):
            arguments["learning_rate"] = float(self.learning_rate)
        trained = self.mapping.trained if self.built else {}
        return {
            "name": self.name,
            "tx": name_of(self._factory, _OWNER),
            "arguments": _plain_data.encode(arguments, _OWNER),
            # `_by_path` recognizes the variables of a loaded model by their paths and shapes.
            "variables": [[list(path), list(v.shape)] for path, v in trained.items()],
        }

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> "OptaxOptimizer":
        """Returns the optimizer that `get_config` described, without its state."""
        arguments = _plain_data.decode(config["arguments"])
        optimizer = cls(find_function(config["tx"]), name=config["name"], **arguments)
        # Not by assignment, for the same reason as in `__init__`. `_by_path` reads them.
        optimizer.__dict__["_saved_paths"] = config["variables"]
        return optimizer


def _create_tx(tx: Any, arguments: Mapping[str, Any]) -> optax.GradientTransformation:
    """Returns the transformation, with a numeric learning rate injected into its state."""
    if not callable(tx):
        check_tx(tx)
        expected = "no arguments with an existing transformation"
        advice = "Pass a function that creates it: OptaxOptimizer(optax.adam, b1=0.8)."
        require(not arguments, _OWNER, expected, sorted(arguments), advice, error=TypeError)
        return tx
    optax_arguments = {name: _to_optax(value) for name, value in arguments.items()}

    if isinstance(optax_arguments.get("learning_rate"), _NUMBER):
        rate: Any = optax_arguments.pop("learning_rate")

        # `inject_hyperparams` would inject every numeric argument. Only the learning rate shall be
        # part of the state, so it is the only parameter here.
        def create_with_rate(learning_rate: Any) -> optax.GradientTransformation:
            return tx(**optax_arguments, learning_rate=learning_rate)

        transformation = optax.inject_hyperparams(create_with_rate)(float(rate))
    else:
        transformation = tx(**optax_arguments)
    check_tx(transformation)
    return transformation


def _to_optax(value: Any) -> Any:
    """Returns a Keras schedule as an optax one, and any other value unchanged."""
    is_keras = isinstance(value, keras.optimizers.schedules.LearningRateSchedule)
    return schedule(value) if is_keras else value


def _require_gradients_suffice(tx: Any, params: PyTree, state: PyTree) -> None:
    """Raises an error if `tx.update` needs more than gradients, state and params.

    Also raises TypeError for a state that an update gives another structure, like `optax.monitor`.
    """
    try:
        _, new_state = jax.eval_shape(tx.update, params, state, params)
    except (AttributeError, TypeError, ValueError) as error:
        error.add_note(
            f"{_OWNER}: Keras gives an optimizer gradients and params only. If this one needs "
            "more, train without Keras: bridge.create_state(model, tx) and functrain.train_step."
        )
        raise
    is_same = _tree.structure(new_state) == _tree.structure(state)
    expected = "a transformation whose state keeps its structure"
    require(is_same, _OWNER, expected, new_state, error=TypeError)
