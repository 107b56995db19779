"""A fit that saves itself, and goes on where a checkpoint was: functrain's, for Keras's parts."""

import os
import re
import warnings
from typing import Any

import jax
import keras
import numpy as np

from bridge import keras_private
from bridge._randomness import put_randomness, randomness
from bridge.state._keras_state import KerasState, originals, variable_lists, write_keras_state
from bridge.train._feed import Resume
from bridge.train._loggers import LoggerCallback
from functrain import CheckpointMismatchError, EpochEnd, Event, Position
from functrain.internal import (
    HeldSignals,
    Resumed,
    Saving,
    by_current_identity,
    by_identity,
    is_number,
    is_resumable,
    steps_until_due,
)
from functrain.internal import tree as _tree


class KerasSaving:
    """Saves a model, its callbacks and its history now and then, and brings them back.

    Args:
      checkpointer: A functrain.Checkpointer.
      model: The model; built, as is everything that `compile` made.
      callbacks: Keras's list.
      source: Keras's EpochIterator.
      quiet: Whether not to say where the fit goes on.

    Attributes:
      run: What saves and restores, as for any run of functrain's, which asks this after the data.
      resumed: The checkpoint, until an epoch goes on from it.
      position: How far the training has come.
    """

    def __init__(
        self, checkpointer: Any, model: keras.Model, callbacks: Any, source: Any, *, quiet: bool
    ) -> None:
        self._model, self._source, self._quiet = model, source, quiet
        remembering = [x for x in callbacks.callbacks if _has_memory(x)]
        watched = keras_private.callbacks.watched
        self._callbacks = by_identity(remembering, "callbacks", default_key=watched)
        self._others = _Others(model, self._callbacks)
        evaluation = "validation_data= or validation_split="
        self.run = Saving(checkpointer, self, {"keras": self._others}, evaluation)
        self._began: dict[str, Any] = {"fetched": 0}  # where the data were when the epoch began
        self._loop: Any = None
        self._event: Event | None = None
        self._is_saved = self._to_end = False
        self._before: KerasState | None = None  # the values, while an evaluation changes metrics
        self._place: dict[str, Any] = {}  # of the data, in the checkpoint
        self.resumed: Resumed | None = None
        self.position = Position()

    def begin(self, epochs: int, evaluation: Any = None) -> bool:
        """Finds out where to go on; returns whether there is anything left to do.

        Args:
          epochs: How many there are to be.
          evaluation: What they are evaluated on, or None.

        Raises:
          CheckpointMismatchError: The checkpoint is of another model or of other data.
        """
        try:
            self.resumed = resumed = self.run.resume(originals(self._model), None, epochs)
            if resumed is None:
                return True
            self._others.require_same_names(resumed.directory)
        except CheckpointMismatchError as error:
            paths = _paths(self._model)
            numbered = re.findall(r"\b\w+/\d+", str(error))
            if lines := [f"{x} is {paths[x]}" for x in numbered if x in paths]:
                error.add_note(f"Of the model here:\n{_tree.bullets(lines)}")
            raise
        self.position = resumed.position
        if not self._quiet:
            print(resumed.said())
        memory = self._others.saved["callbacks"]
        if resumed.finished:
            write_keras_state(resumed.state, self._model)
            for name, callback in self._callbacks.items():
                if type(callback) is keras.callbacks.History:
                    keras_private.callbacks.put_memory(callback, memory[name])
                    self._model.history = callback
            return False
        for name, callback in self._callbacks.items():
            if isinstance(callback, keras.callbacks.CSVLogger) and name in memory:
                _go_on_below(callback, memory[name]["bytes"])
            if isinstance(callback, LoggerCallback) and name in memory:
                callback.restore(memory[name]["own"])  # before it begins, as in functrain.fit
        self._warn(evaluation)
        return True

    def bring_back(self) -> Resume | None:
        """Puts values, callbacks and randomness back; returns where to go on in the epoch."""
        assert self.resumed is not None, "begin() comes first"
        write_keras_state(self.resumed.state, self._model)
        self.resumed = None
        found, place = self._others.saved, self._place
        for name, callback in self._callbacks.items():
            if name in found["callbacks"]:
                memory = found["callbacks"][name]
                keras_private.callbacks.put_memory(callback, memory)
                is_restored = isinstance(callback, LoggerCallback)
                if is_resumable(callback) and "own" in memory and not is_restored:
                    callback.restore(memory["own"])
        keras_private.variables.put_global_seed(found["seed"])
        keras_private.data.go_to(self._source, place.get("place", {"fetched": 0}))
        if not self.position.batch:
            put_randomness(found["randomness"])
            return None
        now = found["randomness"]
        return Resume(self.position.batch, place["ahead"], place["first"], now, place["reported"])

    def begin_epoch(self, epoch: int, loop: Any) -> None:
        """Notes where the data are."""
        self._loop = loop
        self._began = keras_private.data.place(self._source)
        if self.position.epoch != epoch:
            self.position = Position(self.position.step, epoch)

    def until(self) -> int | None:
        """Returns how many steps there are until the next one to save after."""
        return steps_until_due([self.run.when], self.position.step)

    def after(self, steps: int) -> None:
        """Notes that a chunk was taken, and saves if that is due."""
        self.position = self.position.after(steps)
        self._event = Event(position=self.position, state=())
        self._is_saved = False
        if self.run.is_due(self._event):
            self.save()

    def after_epoch(self, logs: dict[str, Any], *, is_last: bool) -> None:
        """Notes that an epoch is over, and saves if that is due; the last one is saved later."""
        values = {name: float(x) for name, x in logs.items() if is_number(x)}
        self._event = EpochEnd(position=self.position, state=(), values=values)
        self._is_saved = False
        self._before = None
        if self.run.is_due(self._event) and not is_last:
            self.save()

    def begin_evaluation(self) -> None:
        """Notes the values to save until the epoch is over: evaluations have other metrics."""
        self._before = self._loop.values()

    def act(self, signals: HeldSignals) -> None:
        """Saves and ends the process with 143 where SIGTERM came, or handles Ctrl-C.

        Of several processes all save the same step, and end; Ctrl-C, which comes to all of them at
        steps that differ, ends each without a save. Where an evaluation of a large model has the
        only values, a signal waits for its end.
        """
        self._to_end = self._to_end or self.run.is_asked_to_end()
        if not (self._to_end or signals.came):
            return
        if any(map(_tree.is_deleted, jax.tree.leaves(self._values()))):
            return
        if self._to_end or jax.process_count() == 1:
            self.save()
        if self._to_end:
            self._to_end = False  # in one process a handler of the user's may have the fit go on
            self.run.act()
        signals.act()

    def save(self) -> None:
        """Saves the fit as it is, unless that was done."""
        if not self._is_saved and self._event is not None:
            over = isinstance(self._event, EpochEnd)
            self.run.save(self._event, {"state": self._values()}, epoch_over=over)
            self._is_saved = True

    def after_all(self, state: KerasState, epochs: int, stopped: bool) -> None:
        """Saves what came of the whole training.

        Args:
          state: The model's values when it was over.
          epochs: How many it was to have.
          stopped: Whether it ended before that.
        """
        final = originals(self._model)
        same = all(map(_is_same, jax.tree.leaves(state), jax.tree.leaves(final)))
        event = self._event or EpochEnd(position=self.position, state=())
        done = {"epochs": epochs, "stopped": stopped}
        trees = {"state": state, **({} if same else {"final": final})}
        self.run.save(event, trees, epoch_over=True, done=done)

    def fingerprint(self) -> dict[str, Any]:
        """Returns what tells the data from others."""
        return keras_private.data.described(self._source)

    def state(self, over: bool) -> dict[str, Any]:
        """Returns where the data are."""
        if over:
            return {"place": keras_private.data.place(self._source)}
        return {
            "place": self._began,
            "first": self._source.randomness,
            "ahead": self._loop.ahead,
            "reported": self._loop.reported(),
        }

    def restore(self, state: dict[str, Any], epoch: int, batch: int) -> list[str]:
        """Notes where the data were, for `bring_back`."""
        self._place = state
        return []

    def _values(self) -> KerasState:
        return self._loop.values() if self._before is None else self._before

    def _warn(self, evaluation: Any) -> None:
        if self.position.step and "examples" not in self.fingerprint():
            warnings.warn(
                "x: only arrays are known to give the same batches again. These data are begun "
                "anew, and the batches of the epoch before the checkpoint left out.",
                stacklevel=5,
            )
        if self.position.epoch and evaluation is not None and evaluation.is_iterator:
            warnings.warn(
                "validation_data: expected arrays, or what can be begun again, got an iterator. It "
                "is begun anew: the evaluations to come may have other batches.",
                stacklevel=5,
            )
        missing = sorted(self._others.saved["callbacks"].keys() - self._callbacks.keys())
        if missing:
            warnings.warn(
                f"callbacks: the checkpoint has {missing}, which are not among those of this fit.",
                stacklevel=5,
            )


class _Others:
    """All else that goes on with a fit: callbacks, randomness.

    Attributes:
      saved: What a checkpoint says of it.
    """

    def __init__(self, model: keras.Model, callbacks: dict[str, Any]) -> None:
        self._model, self._callbacks = model, callbacks
        self.saved: dict[str, Any] = {}

    def state(self) -> dict[str, Any]:
        return {
            "names": _names(self._model),
            "callbacks": {n: found for n, x in self._callbacks.items() if (found := _state(x))},
            "seed": keras_private.variables.global_seed(),
            "randomness": randomness(),
        }

    def restore(self, state: dict[str, Any]) -> None:
        callbacks = by_current_identity(state["callbacks"], self._callbacks)
        self.saved = {**state, "callbacks": callbacks}

    def require_same_names(self, directory: str) -> None:
        pairs = zip(self.saved["names"], _names(self._model), strict=True)
        lines = [f"saved {a}, expected {b}" for a, b in pairs if a != b]
        if lines:
            raise CheckpointMismatchError(
                f"{directory}: its variables are not those of the model:\n"
                f"{_tree.bullets(lines)}\nThe model is unchanged."
            )


def _has_memory(callback: Any) -> bool:
    return keras_private.callbacks.has_memory(callback) or is_resumable(callback)


def _state(callback: Any) -> dict[str, Any]:
    """Returns what a callback remembers: one of Keras's, or a user's that says so."""
    own = {"own": callback.state()} if is_resumable(callback) else {}
    if isinstance(callback, keras.callbacks.CSVLogger):
        path = os.fspath(callback.filename)
        own["bytes"] = os.path.getsize(path) if os.path.exists(path) else 0
    return {**keras_private.callbacks.memory(callback), **own}


def _go_on_below(logger: Any, size: int) -> None:
    """Cuts off the rows that come again, and has the logger write below the others."""
    path = os.fspath(logger.filename)
    if size and os.path.exists(path) and os.path.getsize(path) >= size:
        os.truncate(path, size)
        logger.append = True


def _paths(model: keras.Model) -> dict[str, str]:
    """Returns the paths of all variables, by what a checkpoint calls them."""
    lists = variable_lists(model).items()
    return {f"{name}/{i}": v.path for name, variables in lists for i, v in enumerate(variables)}


def _names(model: keras.Model) -> list[str]:
    """Returns the paths of all variables, without the numbers that Keras counts objects with."""
    return [re.sub(r"_\d+(?=_|/|$)", "", path) for path in _paths(model).values()]


def _is_same(a: Any, b: Any) -> bool:
    return a is b or bool(np.array_equal(a, b, equal_nan=a.dtype.kind == "f"))
