"""A model's values while a run has them: lent to the model, and taken back if they changed."""

import jax
import keras

from bridge import keras_private
from bridge.state._keras_state import FIELDS, KerasState, variable_values
from functrain.events import Event
from functrain.internal import SPARE_BYTES, PyTree, copy_arrays, nbytes
from functrain.internal import tree as _tree

_FIELDS = {
    "train": FIELDS,
    "test": ("trainable", "non_trainable", "metrics"),
    "predict": ("trainable", "non_trainable"),
}


class ModelValues:
    """The values of a model that a run trains, evaluates or predicts with.

    The run owns the arrays, and its programs consume them. The model is told where they are, and
    assigns them to its variables only when somebody looks: a callback that reads `self.model`.
    From then on the model's variables are the ones that count.

    Args:
      model: The model; built, as is everything that `compile` made.
      kind: "train", "test" or "predict".
    """

    def __init__(self, model: keras.Model, kind: str) -> None:
        self._model, self._fields = model, _FIELDS[kind]
        self._lent: KerasState | None = None  # the last state, whose arrays may be consumed
        keras_private.trainer_state.forget(model)  # what a step that failed has left

    @property
    def shapes(self) -> PyTree:
        """Shapes, dtypes and shardings of the state that a step of this kind takes."""
        state = self.variable_values() if self._lent is None else self._lent
        return jax.tree.map(
            lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), state
        )

    def variable_values(self) -> KerasState:
        """Returns the arrays of the model's variables."""
        return variable_values(self._model, self._fields)

    @property
    def are_in_model(self) -> bool:
        """Returns True if the model's variables have the values: those of a run may be older."""
        return keras_private.trainer_state.is_synced(self._model)

    def lend(self, state: KerasState) -> None:
        """Tells the model where its values are, for callbacks that read it."""
        self._lent = state
        lists = {f"{name}_variables": getattr(state, name) for name in self._fields}
        keras_private.trainer_state.publish(self._model, lists)

    def assign(self) -> None:
        """Assigns the values to the model's variables, unless that was done."""
        keras_private.trainer_state.sync(self._model)
        keras_private.layers.forget_losses(self._model)

    def put(self, state: KerasState) -> None:
        """Assigns other values to the model's variables."""
        self.lend(state)
        self.assign()

    def show(self, event: Event) -> None:
        """Has the run see the model's variables, if they have the values: it may save them."""
        if self.are_in_model:
            event.hand_over(_tree.copy_if_needed(self.variable_values()))

    def take_back(self, event: Event) -> None:
        """Has the run continue with the model's variables, if they have the values.

        A callback may have changed them. They are copied for the run, so that they can be gone
        back to; those of a large model are not, as they are not by Keras's own fit.
        """
        if not self.are_in_model:
            return
        self.show(event)
        if nbytes(event.state) <= SPARE_BYTES:
            event.hand_over(copy_arrays(event.state), spare=event.state)
        keras_private.trainer_state.purge(self._model, self._fields)
        self.lend(event.state)
