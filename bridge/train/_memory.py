"""What a fit saves beside the model's values: callbacks, seeds and randomness."""

import os
import re
from typing import Any

import keras

from bridge import keras_private
from bridge._randomness import random_state, set_random_state
from bridge.state._keras_state import variable_lists
from bridge.train._loggers import LoggerCallback
from functrain import CheckpointMismatchError
from functrain.internal import by_identity, is_resumable
from functrain.internal import tree as _tree


class Memory:
    """What callbacks remember, and the state of the random numbers, in a checkpoint.

    Args:
      model: The model.
      callbacks: Keras's list.

    Attributes:
      is_pending: True from `restore` to `bring_back`.
    """

    def __init__(self, model: keras.Model, callbacks: Any) -> None:
        self._model = model
        resumable = [
            callback
            for callback in callbacks.callbacks
            if keras_private.callbacks.has_state(callback) or is_resumable(callback)
        ]
        watched = keras_private.callbacks.default_key
        self._callbacks = by_identity(resumable, "callbacks", default_key=watched)
        self._saved: dict[str, Any] | None = None
        self.is_pending = False

    def state(self) -> dict[str, Any]:
        """Returns what to save."""
        states = {name: _state(callback) for name, callback in self._callbacks.items()}
        return {
            "names": _names(self._model),
            "callbacks": {name: state for name, state in states.items() if state},
            "seed": keras_private.variables.global_seed(),
            "randomness": random_state(),
        }

    def restore(self, state: dict[str, Any]) -> None:
        """Notes what `state` returned, for the other methods.

        Raises:
          CheckpointMismatchError: The variables have other names than those of the model.
        """
        pairs = zip(state["names"], _names(self._model), strict=True)
        lines = [f"saved {a}, expected {b}" for a, b in pairs if a != b]
        if lines:
            raise CheckpointMismatchError(
                "checkpointer: the variables in the checkpoint are not those of the model:\n"
                f"{_tree.bullets(lines)}\nThe model is unchanged."
            )
        self._saved, self.is_pending = state, True

    def restore_files(self) -> None:
        """Has callbacks that write a file continue below the rows that were saved.

        Loggers of functrain are restored before they begin, as in `functrain.fit`.
        """
        for callback, memory in self._remembered():
            if isinstance(callback, keras.callbacks.CSVLogger):
                _continue_file(callback, memory["bytes"])
            if isinstance(callback, LoggerCallback):
                callback.restore(memory["own"])

    def restore_history(self) -> None:
        """Puts back the history alone, of a fit that is over."""
        for callback, memory in self._remembered():
            if type(callback) is keras.callbacks.History:
                keras_private.callbacks.restore(callback, memory)
                self._model.history = callback

    def bring_back(self) -> None:
        """Puts back what callbacks remembered, and the randomness."""
        assert self._saved is not None, "restore comes first"
        for callback, memory in self._remembered():
            keras_private.callbacks.restore(callback, memory)
            if "own" in memory and not isinstance(callback, LoggerCallback):
                callback.restore(memory["own"])
        keras_private.variables.set_global_seed(self._saved["seed"])
        set_random_state(self._saved["randomness"])
        self.is_pending = False

    def unknown(self) -> list[str]:
        """Returns the callbacks of the checkpoint that this fit does not have."""
        assert self._saved is not None, "restore comes first"
        return sorted(self._saved["callbacks"].keys() - self._callbacks.keys())

    def _remembered(self) -> list[tuple[Any, dict[str, Any]]]:
        """Returns each callback that the checkpoint knows, with what it remembered."""
        assert self._saved is not None, "restore comes first"
        saved = self._saved["callbacks"]
        return [(x, saved[name]) for name, x in self._callbacks.items() if name in saved]


def variable_paths(model: keras.Model) -> dict[str, str]:
    """Returns the paths of all variables, by the names that they have in a checkpoint."""
    return {
        f"{name}/{i}": variable.path
        for name, variables in variable_lists(model).items()
        for i, variable in enumerate(variables)
    }


def _names(model: keras.Model) -> list[str]:
    """Returns the paths of all variables, without the numbers that Keras counts objects with."""
    return [re.sub(r"_\d+(?=_|/|$)", "", path) for path in variable_paths(model).values()]


def _state(callback: Any) -> dict[str, Any]:
    """Returns what a callback remembers: one of Keras's, or a user's with `state` and `restore`."""
    state = keras_private.callbacks.state(callback)
    if is_resumable(callback):
        state["own"] = callback.state()
    if isinstance(callback, keras.callbacks.CSVLogger):
        path = os.fspath(callback.filename)
        state["bytes"] = os.path.getsize(path) if os.path.exists(path) else 0
    return state


def _continue_file(logger: Any, size: int) -> None:
    """Cuts off the rows that come again, and has the logger write below the others."""
    path = os.fspath(logger.filename)
    if size and os.path.exists(path) and os.path.getsize(path) >= size:
        os.truncate(path, size)
        logger.append = True
