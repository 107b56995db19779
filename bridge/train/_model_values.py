"""The values of a model during a run: its variables have them, or the run has them."""

import keras

from bridge import keras_private
from bridge.state._keras_state import FIELDS, KerasState, variable_lists
from functrain.events import Event
from functrain.internal import tree as _tree

_FIELDS = {
    "train": FIELDS,
    "test": ("trainable", "non_trainable", "metrics"),
    "predict": ("trainable", "non_trainable"),
}
_read, _write = keras_private.variables.read, keras_private.variables.write


class ModelValues:
    """Moves the values of a model between its variables and a run; one of them has them at a time.

    The variables have them whenever code of the user's may look at the model: callbacks, data,
    evaluations. `pull` takes them out before a program, which donates them, and `push` puts the
    program's results in. Both move references, and copy no array.

    Args:
      model: The model; it and all that `compile` made are built.
      kind: "train", "test" or "predict".

    Attributes:
      are_in_model: True if the variables have the values, False if the run has them.
    """

    def __init__(self, model: keras.Model, kind: str) -> None:
        self._model, self._fields = model, _FIELDS[kind]
        self.are_in_model = True
        # The run's state, while the variables have the values, and the identities of its arrays.
        self._state: KerasState | None = None
        self._ids: list[int] = []
        keras_private.trainer.reattach(model)
        self._find_variables()

    def _find_variables(self) -> None:
        # The model's properties walk over all layers, which takes longer than a small step.
        lists = variable_lists(self._model)
        self._lists = [list(lists[name]) if name in self._fields else [] for name in FIELDS]
        self._variables = [variable for variables in self._lists for variable in variables]

    def read(self) -> KerasState:
        """Returns the arrays in the variables, not copies."""
        return KerasState(*map(_read, self._lists))

    def begin_epoch(self, event: Event) -> None:
        """Makes the values in the variables those of the run."""
        # A callback may have frozen layers.
        self._find_variables()
        self.update(event)

    def update(self, event: Event) -> None:
        """Makes the values in the variables those of the run, if the user's code changed them."""
        ids = list(map(id, _read(self._variables)))
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
        self.are_in_model, self._state = False, None
        _write(self._variables, [None] * len(self._variables))

    def push(self, state: KerasState) -> None:
        """Puts a state into the variables: from here on, they have the values."""
        values = [*state.trainable, *state.non_trainable, *state.optimizer, *state.metrics]
        _write(self._variables, values)
        self.are_in_model, self._state, self._ids = True, state, list(map(id, values))
        keras_private.trainer.forget_losses(self._model)

    def restore(self, last_state: KerasState | None) -> bool:
        """Puts values into all variables, however a run has ended.

        Args:
          last_state: The last complete state of the run, or None.

        Returns:
          False if there are variables whose values are lost.
        """
        if self.are_in_model:
            # A loop of Keras's that a callback called may have failed.
            keras_private.trainer.reattach(self._model)
        if last_state is not None and (not self.are_in_model or self._has_lost_values()):
            self.push(last_state)
        keras_private.trainer.forget_losses(self._model)
        return not self._has_lost_values()

    def _has_lost_values(self) -> bool:
        values = _read(self._variables)
        return any(value is None or _tree.is_deleted(value) for value in values)
