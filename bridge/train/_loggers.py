"""Loggers of functrain, such as its TensorBoard, among the callbacks of Keras."""

import contextlib
from typing import Any

import jax
import keras

from functrain import EpochEnd, LogsReady, Position
from functrain.internal import Chunk, Logger, PyTree, on_host
from functrain.internal import tree as _tree


def with_loggers(callbacks: Any) -> tuple[Any, list["LoggerCallback"]]:
    """Returns callbacks with each logger wrapped in a `LoggerCallback`, and a list of these."""

    def wrapped(callback: Any) -> Any:
        return LoggerCallback(callback) if isinstance(callback, Logger) else callback

    new = keras.tree.map_structure(wrapped, callbacks)
    flat = keras.tree.flatten(getattr(new, "callbacks", new))
    return new, [callback for callback in flat if isinstance(callback, LoggerCallback)]


class LoggerCallback(keras.callbacks.Callback):  # type: ignore[misc]  # keras has no types
    """Hands a logger what steps and epochs report; steps one chunk late, so that nobody waits.

    Steps are counted from the optimizer's count on, so that a second fit of a model continues the
    axis of the first.

    Args:
      logger: A logger of functrain.
    """

    def __init__(self, logger: Logger) -> None:
        super().__init__()
        self.logger = logger
        self.resume_key = f"{type(logger).__name__}({getattr(logger, 'resume_key', '')})"
        self._position: Position | None = None
        self._late: tuple[Position, Chunk, PyTree] | None = None

    def on_train_begin(self, logs: Any = None) -> None:
        """Begins, where a checkpoint has not said at which step."""
        self._position = self._position or Position(_steps_taken(self.model))
        if _is_first_process():
            self.logger.begin()

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        """Notes the number of the epoch."""
        self._position = Position(self._now.step, epoch)

    def take(self, chunk: Chunk, rows: PyTree) -> None:
        """Takes what the steps of a chunk report, and logs what those of the last one did."""
        self._log_steps()
        self._position = self._now.after(chunk.steps)
        self._late = self._now, chunk._replace(batches=None), rows

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        """Logs the values of an epoch, those of its evaluation as well."""
        self._log_steps()
        if _is_first_process():
            self.logger(EpochEnd(position=self._now, state=(), values=dict(logs or {})))

    def state(self) -> dict[str, Any]:
        """Logs what is late; returns what to save."""
        self._log_steps()
        return {"step": self._now.step, "logger": self.logger.state()}

    def restore(self, state: dict[str, Any]) -> None:
        """Continues where `state` was returned; to be called before the fit begins."""
        self._position = Position(state["step"])
        if _is_first_process():  # all processes may see the logger's file
            self.logger.restore(state["logger"])

    def close(self) -> None:
        """Logs what is late, and ends; to be called however the fit ended."""
        with contextlib.suppress(Exception):  # of a program that failed there is nothing to log
            self._log_steps()
        self._late = self._position = None
        if _is_first_process():
            self.logger.close()

    @property
    def _now(self) -> Position:
        assert self._position is not None, "on_train_begin comes first"
        return self._position

    def _log_steps(self) -> None:
        late, self._late = self._late, None
        if late is None:
            return
        position, chunk, rows = late
        numbers = {
            _tree.keys(path)[-1]: x  # callbacks of Keras see nested logs under their last name
            for path, x in jax.tree_util.tree_leaves_with_path(rows)
            if x.ndim == 1 and not _tree.is_key(x)
        }
        logs = on_host(numbers, chunk.steps)
        if _is_first_process():
            self.logger.logs(
                LogsReady(position=position, steps=chunk.steps, examples=chunk.examples, logs=logs)
            )


def _is_first_process() -> bool:
    return jax.process_index() == 0


def _steps_taken(model: keras.Model) -> int:
    """Returns how many steps the optimizer of a model has taken."""
    optimizer = getattr(model, "optimizer", None)
    if optimizer is None:
        return 0
    accumulated = (
        getattr(optimizer, "gradient_accumulation_steps", None) or 1
    )  # an update takes so many steps
    return int(keras.ops.convert_to_numpy(optimizer.iterations)) * accumulated
