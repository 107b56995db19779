"""What a fit saves beside the model's values: states of callbacks, seeds and random generators."""

import contextlib
import os
import re
from collections.abc import Iterator
from typing import Any

import keras

from bridge import keras_private
from bridge.state._keras_state import variable_paths
from bridge.train._callbacks import LoggerCallback
from functrain import CheckpointMismatchError
from functrain.internal import by_identity, is_resumable
from functrain.internal import tree as _tree


class Memory:
    """The states of callbacks and random generators, in a checkpoint.

    Args:
      model: The model.
      callbacks: Keras's list.

    Attributes:
      is_pending: True after `restore`, until `restore_callbacks`.
    """

    def __init__(self, model: keras.Model, callbacks: Any) -> None:
        self._model = model
        has_state = keras_private.callbacks.has_state
        resumable = [x for x in callbacks.callbacks if has_state(x) or is_resumable(x)]
        default_key = keras_private.callbacks.default_key
        self._callbacks = by_identity(resumable, "callbacks", default_key=default_key)
        self._saved: dict[str, Any] = {}
        self.is_pending = False

    def state(self) -> dict[str, Any]:
        """Returns what to save."""
        states = {name: _state(callback) for name, callback in self._callbacks.items()}
        # The paths tell models apart whose lists of variables have equal shapes.
        return {
            "names": _comparable_paths(self._model),
            "callbacks": {name: state for name, state in states.items() if state},
            "seed": keras_private.variables.global_seed(),
            "randomness": keras_private.data.random_state(),
        }

    def restore(self, state: dict[str, Any]) -> None:
        """Keeps what `state` returned, for the other methods.

        Raises:
          CheckpointMismatchError: The variables have other names than those of the model.
        """
        paths = zip(state["names"], _comparable_paths(self._model), strict=True)
        lines = [f"saved {saved}, expected {path}" for saved, path in paths if saved != path]
        if lines:
            raise CheckpointMismatchError(
                "checkpointer: expected a checkpoint with the model's variables, got\n"
                f"{_tree.bullets(lines)}\nThe model is unchanged."
            )
        self._saved, self.is_pending = state, True

    @contextlib.contextmanager
    def files_restored(self) -> Iterator[None]:
        """Context manager: callbacks that write a file continue below the saved rows.

        It is entered before the callbacks begin: a CSVLogger opens its file then, and a logger of
        functrain is restored before it begins, as in `functrain.fit`.
        """
        with contextlib.ExitStack() as stack:
            for callback, state in self._saved_states():
                if isinstance(callback, keras.callbacks.CSVLogger):
                    # In a later fit, it begins its file as the user said.
                    for name in ("append", "append_header"):
                        stack.callback(setattr, callback, name, getattr(callback, name))
                    _truncate_file(callback, state["bytes"])
                if isinstance(callback, LoggerCallback):
                    callback.restore(state["own"])
            yield

    def restore_history(self) -> None:
        """Restores only the history, for a fit that has already finished."""
        # The other callbacks do not begin, and have no use for their states.
        for callback, state in self._saved_states():
            if type(callback) is keras.callbacks.History:
                keras_private.callbacks.restore(callback, state)
                self._model.history = callback

    def restore_callbacks(self) -> None:
        """Restores the callbacks and the random generators."""
        for callback, state in self._saved_states():
            keras_private.callbacks.restore(callback, state)
            if "own" in state and not isinstance(callback, LoggerCallback):
                callback.restore(state["own"])
        keras_private.variables.set_global_seed(self._saved["seed"])
        keras_private.data.set_random_state(self._saved["randomness"])
        self.is_pending = False

    def missing_callbacks(self) -> list[str]:
        """Returns the names of callbacks in the checkpoint that this fit does not have."""
        return sorted(self._saved["callbacks"].keys() - self._callbacks.keys())

    def _saved_states(self) -> list[tuple[Any, dict[str, Any]]]:
        """Returns the callbacks that have a state in the checkpoint, each with that state."""
        saved = self._saved["callbacks"]
        return [(x, saved[name]) for name, x in self._callbacks.items() if name in saved]


def _comparable_paths(model: keras.Model) -> list[str]:
    """Returns the paths of all variables, without the numbers with which Keras counts objects.

    Keras counts over the whole process, so a second model of one architecture has other numbers.
    """
    return [re.sub(r"_\d+(?=_|/|$)", "", path) for path in variable_paths(model).values()]


def _state(callback: Any) -> dict[str, Any]:
    """Returns the state of a Keras callback, or of a user's with `state` and `restore`."""
    # A user's subclass of a Keras callback may have both.
    state = keras_private.callbacks.state(callback)
    if is_resumable(callback):
        state["own"] = callback.state()
    if isinstance(callback, keras.callbacks.CSVLogger):
        path = os.fspath(callback.filename)
        state["bytes"] = os.path.getsize(path) if os.path.exists(path) else 0
    return state


def _truncate_file(logger: Any, size: int) -> None:
    """Removes rows written after the checkpoint, and makes the logger append to the others."""
    path = os.fspath(logger.filename)
    # A shorter file is not the one that was saved: the logger then begins a new file.
    if size and os.path.exists(path) and os.path.getsize(path) >= size:
        os.truncate(path, size)
        logger.append = True
