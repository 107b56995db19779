"""The values of a model during a run, which the run and the model's variables hold in turns."""

import jax
import keras

from bridge import keras_private
from bridge.state._keras_state import FIELDS, KerasState, variable_values
from functrain.events import Event
from functrain.internal import PyTree
from functrain.internal import tree as _tree

_FIELDS = {
    "train": FIELDS,
    "test": ("trainable", "non_trainable", "metrics"),
    "predict": ("trainable", "non_trainable"),
}


class ModelValues:
    """The values of a model that a run trains, evaluates or predicts with.

    The run owns the arrays, and its programs donate them. The model is told where they are, and
    assigns them to its variables only when a callback reads `self.model`. From then on the values
    in the model's variables count.

    Args:
      model: The model; it and all that `compile` made are built.
      kind: "train", "test" or "predict".
    """

    def __init__(self, model: keras.Model, kind: str) -> None:
        self._model, self._fields = model, _FIELDS[kind]
        # The latest state that was lent. Its arrays may have been donated since: only their shapes
        # are read.
        self._lent_state: KerasState | None = None
        # An earlier step that failed, as in train_on_batch, may have left its values there.
        keras_private.trainer_state.forget(model)

    @property
    def shapes(self) -> PyTree:
        """Shapes, dtypes and shardings of the state that a step of this kind takes."""
        state = self.variable_values() if self._lent_state is None else self._lent_state
        return jax.tree.map(
            lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), state
        )

    def variable_values(self) -> KerasState:
        """Returns the arrays of the model's variables, not copies."""
        return variable_values(self._model, self._fields)

    @property
    def are_in_model(self) -> bool:
        """Returns True if the variables have the values, and those of the run may be older."""
        return keras_private.trainer_state.is_synced(self._model)

    def lend(self, state: KerasState) -> None:
        """Tells the model where its values are, for callbacks that read it."""
        self._lent_state = state
        lists = {f"{name}_variables": getattr(state, name) for name in self._fields}
        keras_private.trainer_state.publish(self._model, lists)

    def assign(self) -> None:
        """Assigns the values to the model's variables, unless that has been done."""
        keras_private.trainer_state.sync(self._model)
        keras_private.layers.forget_losses(self._model)

    def put(self, state: KerasState) -> None:
        """Assigns another state to the model's variables."""
        self.lend(state)
        self.assign()

    def hand_over(self, event: Event) -> None:
        """Gives the run the values in the model's variables, if they count, to save them."""
        if self.are_in_model:
            event.hand_over(_tree.copy_if_needed(self.variable_values()))

    def take_back(self, event: Event) -> None:
        """Gives the run the values in the model's variables, if they count, to continue with.

        A callback may have changed them.
        """
        if not self.are_in_model:
            return
        self.hand_over(event)
        # Otherwise the variables would keep the old values in memory beside the new ones.
        keras_private.trainer_state.purge(self._model, self._fields)
        self.lend(event.state)
