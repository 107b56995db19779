"""A compiled model's own steps, as functrain steps, and the values that a run of them has."""

import contextlib
import traceback
from collections.abc import Iterator

import jax
import jax.numpy as jnp
import keras

from bridge import keras_private
from bridge.state._keras_state import (
    FIELDS,
    KerasState,
    Variables,
    require_compiled,
    variable_lists,
)
from functrain import Step
from functrain.events import Event
from functrain.internal import PyTree, StepTraits, error_notes, jit, require_instance
from functrain.internal import tree as _tree

# The values that a step of each kind takes, and may change.
_FIELDS = {
    "train": FIELDS,
    "test": ("trainable", "non_trainable", "metrics"),
    "predict": ("trainable", "non_trainable"),
}


def train_step(model: keras.Model) -> Step[KerasState]:
    """Returns the model's own `train_step`, overridden or not, as a functrain step.

    Args:
      model: A compiled model.

    Returns:
      ``step(state: KerasState, batch) -> (state, logs)``: pure, not jitted, for `functrain.fuse`,
      `functrain.run`, `jax.jit`, `jax.vmap`. Logs are the values that the model's step reports:
      running values of its metrics, which `state.metrics` carries.

    Raises:
      TypeError: `model` is not a keras.Model.
      ValueError: `model` is not compiled, or an RNN has ``stateful=True``. From the step: the
        optimizer was built for other variables than the model trains now.

    Examples:
      >>> import bridge, functrain as ft, keras, numpy as np
      >>> model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
      >>> model.compile("sgd", "mse")
      >>> batches = np.ones((5, 4, 3), np.float32), np.ones((5, 4, 1), np.float32)
      >>> state = bridge.keras_state(model, (batches[0][0], batches[1][0]))
      >>> state, logs = ft.fuse(train_step(model), 5)(state, batches)
      >>> logs["loss"].shape
      (5,)
    """
    require_compiled(model)
    return KerasStep(model, "train")


def test_step(model: keras.Model) -> Step[KerasState]:
    """Returns the model's own `test_step`, overridden or not, as a functrain step.

    It is used as `train_step` is, and leaves the optimizer's variables unchanged.

    Args:
      model: A compiled model.

    Returns:
      ``step(state: KerasState, batch) -> (state, logs)``.

    Raises:
      TypeError: `model` is not a keras.Model.
      ValueError: `model` is not compiled, or an RNN has ``stateful=True``.

    Examples:
      >>> import bridge, jax, keras, numpy as np
      >>> model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
      >>> model.compile("sgd", "mse")
      >>> batch = np.ones((4, 3), np.float32), np.ones((4, 1), np.float32)
      >>> state, logs = jax.jit(test_step(model))(bridge.keras_state(model, batch), batch)
      >>> sorted(logs)
      ['loss']
    """
    require_compiled(model)
    return KerasStep(model, "test")


def cached_step(model: keras.Model, kind: str) -> "KerasStep":
    """Returns the step of fit, evaluate or predict, which keeps its compiled programs.

    It is stored beside Keras's own compiled step, and replaced and freed together with it: by
    `model.compile` and `model.make_train_function(force=True)`. Other changes have no effect, as in
    Keras: attributes of a layer and what a loss refers to are compiled in.
    """
    owner = keras_private.trainer.owner_of_step(model, kind)
    # Freezing layers moves variables between the lists, which a trace takes as they are.
    variables = [list(map(id, variables)) for variables in variable_lists(model).values()]
    # Past Keras's __setattr__, which would track the step.
    cached = vars(owner).get(f"_bridge_{kind}")
    if cached is None or cached[0] != variables:
        cached = variables, KerasStep(model, kind)
        vars(owner)[f"_bridge_{kind}"] = cached
    step: KerasStep = cached[1]
    return step


class KerasStep(StepTraits):
    """One of a model's own steps as a functrain step.

    Args:
      model: The model; compiled, unless the step predicts.
      kind: "train", "test" or "predict".

    Raises:
      ValueError: The model trains or evaluates a stateful RNN.
    """

    # Keras functions that are jitted stay compiled if the step runs operation by operation.
    stays_compiled = True

    def __init__(self, model: keras.Model, kind: str) -> None:
        self.model = model
        self.kind = kind
        if kind != "predict":
            _require_stateless_rnns(model)
        # Traced once for each shape of a batch, as in Keras: `output_shapes` and all programs share
        # the trace.
        self._traced_predict = jit(self._predict, inline=True)

    def __call__(self, state: KerasState, batch: PyTree, /) -> tuple[KerasState, PyTree]:
        """Takes one step; returns the new state, and the logs or outputs."""
        expected = "a KerasState, from bridge.keras_state(model)"
        advice = "For a TrainState use functrain.train_step."
        require_instance("state", state, KerasState, expected, advice)
        with error_notes(batch):
            if self.kind != "predict":
                has_targets = isinstance(batch, tuple) and len(batch) > 1 and batch[1] is not None
                with keras_private.trainer.target_notes(has_targets=has_targets):
                    return self._train_or_test(state, batch)
            leaves = jax.tree.leaves((state, batch))
            is_traced = any(isinstance(x, jax.core.Tracer) for x in leaves)
            return (self._traced_predict if is_traced else self._predict)(state, batch)

    def output_shapes(self, state: KerasState, batch: PyTree) -> PyTree:
        """Returns the shapes of the outputs for a batch, given the shapes of a state."""
        with error_notes(batch):
            return self._traced_predict.eval_shape(state, batch)[1]

    def _train_or_test(self, state: KerasState, batch: PyTree) -> tuple[KerasState, PyTree]:
        # Keras's order of the four lists; its steps return logs first, and the state after them.
        old = (state.trainable, state.non_trainable, state.optimizer, state.metrics)
        with _hidden_values(self.model):
            if self.kind == "train":
                with _optimizer_errors(self.model):
                    logs, new = self.model.train_step(old, batch)
            else:
                tested = (state.trainable, state.non_trainable, state.metrics)
                logs, (trainable, non_trainable, metrics) = self.model.test_step(tested, batch)
                new = (trainable, non_trainable, state.optimizer, metrics)
        method = f"{type(self.model).__name__}.{self.kind}_step"
        expected = "a dict of logs, such as {'loss': loss}, as in Keras's own fit"
        require_instance(method, logs, dict, expected)
        return KerasState(*map(_cast_like, old, new)), logs

    def _predict(self, state: KerasState, batch: PyTree) -> tuple[KerasState, PyTree]:
        values = (state.trainable, state.non_trainable)
        outputs, non_trainable = self.model.predict_step(values, batch)
        return state.replace(non_trainable=_cast_like(state.non_trainable, non_trainable)), outputs


@contextlib.contextmanager
def _hidden_values(model: keras.Model) -> Iterator[None]:
    """Context manager: takes the values out of a model's variables, as Keras's own fit does.

    A step that reads a variable outside of its state then raises an error, instead of being
    compiled with a value that changes, or losing what a layer's `call` assigns to a metric.

    Raises:
      ValueError: The step made variables, for which the state has no place.
    """
    variables = [v for variables in variable_lists(model).values() for v in variables]
    variables_before = len(model.variables)
    try:
        with keras_private.variables.temporary_values((v, None) for v in variables):
            yield
    except TypeError as error:
        # Keras says "'NoneType' object is not callable".
        frame = list(traceback.walk_tb(error.__traceback__))[-1][0]
        variable = frame.f_locals.get("self")
        if isinstance(variable, keras.Variable) and frame.f_code.co_name == "value":
            error.add_note(
                f"The step reads {variable.path} outside of its state, as a metric that returns "
                "the learning rate does. While steps run, variables have no values, as in Keras's "
                "own fit. Read it in a callback instead."
            )
        raise
    new_paths = [variable.path for variable in model.variables[variables_before:]]
    if new_paths:
        raise ValueError(
            f"model: expected {model.name!r} to have all its variables before a step, got a step "
            f"that made {', '.join(new_paths)}: a layer is called for the first time where "
            "training=True. Call model(x, training=True) once, and compile it again."
        )


@contextlib.contextmanager
def _optimizer_errors(model: keras.Model) -> Iterator[None]:
    """Context manager: says what to do if the optimizer was built for other variables."""
    try:
        yield
    except ValueError as error:
        if not keras_private.optimizers.is_of_other_variables(error):
            raise
        raise ValueError(
            f"optimizer: expected one that was built for the variables that {model.name!r} trains "
            "now, got one that was built for others. Freezing or unfreezing layers and enable_lora "
            "change these variables. Call model.compile(...) again, with a new optimizer."
        ) from error


def _cast_like(old: Variables, new: Variables) -> Variables:
    """Returns new values in the dtypes of the old ones, as assigning to a variable casts them."""
    return [jnp.asarray(x, dtype=v.dtype) for v, x in zip(old, new, strict=True)]


def _require_stateless_rnns(model: keras.Model) -> None:
    """Raises ValueError for a stateful RNN, whose states are in none of the model's lists."""
    for layer in keras_private.layers.all_layers(model):
        if isinstance(layer, keras.layers.RNN) and layer.stateful:
            raise ValueError(
                f"layer {layer.name!r}: expected stateful=False, got stateful=True. Its states are "
                "in no list of variables, and would be lost from step to step, as they are in "
                "model.fit. Pass them (return_state=True, initial_state=...)."
            )


class ModelValues:
    """Moves the values of a model between its variables and a run; one of them has them at a time.

    The variables have them whenever code of the user's may look at the model: callbacks, data,
    evaluations. `pull` takes them out before a program, which donates them, and `push` puts the
    program's results in. Both move references, and copy no array.

    Args:
      model: The model; it and all that `compile` made are built.
      kind: "train", "test" or "predict".
    """

    def __init__(self, model: keras.Model, kind: str) -> None:
        self._model, self._fields = model, _FIELDS[kind]
        # The run's state, while the variables have the values, and the identities of its arrays.
        self._state: KerasState | None = None
        self._ids: list[int] = []
        keras_private.trainer.reattach(model)
        self.find_variables()

    def find_variables(self) -> None:
        """Finds the variables of each field anew. Call it when the user may have frozen layers."""
        # The model's properties walk over all layers, which takes longer than a small step.
        lists = variable_lists(self._model)
        self._lists = [list(lists[name]) if name in self._fields else [] for name in FIELDS]
        self._variables = [variable for variables in self._lists for variable in variables]

    def read(self) -> KerasState:
        """Returns the arrays in the variables, not copies."""
        return KerasState(*map(keras_private.variables.read, self._lists))

    def update(self, event: Event) -> None:
        """Makes the values in the variables those of the run, if the user's code changed them."""
        ids = list(map(id, keras_private.variables.read(self._variables)))
        if self._state is not None and ids == self._ids:
            return
        if self._has_lost_values():
            self.restore(self._state)
        state = self.read()
        # Two variables may share an array, which cannot be donated twice.
        if len(set(ids)) < len(ids):
            state = _tree.copy_if_needed(state)
        self.push(state)
        event.hand_over(state)

    def pull(self, event: Event) -> None:
        """Takes the values out of the variables: from here on, the run has them.

        A step that reads a variable outside of its state then fails, as in Keras, instead of being
        compiled with a value that changes.
        """
        self.update(event)
        self._state = None
        keras_private.variables.write(self._variables, [None] * len(self._variables))

    def push(self, state: KerasState) -> None:
        """Puts a state into the variables: from here on, they have the values."""
        values = [*state.trainable, *state.non_trainable, *state.optimizer, *state.metrics]
        keras_private.variables.write(self._variables, values)
        self._state, self._ids = state, list(map(id, values))
        keras_private.trainer.forget_losses(self._model)

    def restore(self, last_state: KerasState | None) -> bool:
        """Puts values into all variables, however a run has ended.

        Args:
          last_state: The last complete state of the run, or None.

        Returns:
          False if there are variables whose values are lost.
        """
        # A loop of Keras's that a callback called may have failed.
        keras_private.trainer.reattach(self._model)
        if last_state is not None and self._has_lost_values():
            self.push(last_state)
        keras_private.trainer.forget_losses(self._model)
        return not self._has_lost_values()

    def _has_lost_values(self) -> bool:
        values = keras_private.variables.read(self._variables)
        return any(value is None or _tree.is_deleted(value) for value in values)
