"""Loggers of functrain, such as its TensorBoard, among the callbacks of Keras."""

import dataclasses
from typing import Any

import jax
import keras

from functrain import Position
from functrain.events import EpochEnd, LogsReady
from functrain.internal import Logger


def with_loggers(callbacks: Any) -> tuple[Any, list["LoggerCallback"]]:
    """Returns callbacks with each logger wrapped in a `LoggerCallback`, and a list of these."""

    def wrapped(callback: Any) -> Any:
        # A CSVLogger has a trigger, which callbacks know nothing of.
        is_logger = isinstance(callback, Logger) and not hasattr(callback, "every")
        return LoggerCallback(callback) if is_logger else callback

    new = keras.tree.map_structure(wrapped, callbacks)
    flat = keras.tree.flatten(getattr(new, "callbacks", new))
    return new, [callback for callback in flat if isinstance(callback, LoggerCallback)]


class LoggerCallback(keras.callbacks.Callback):  # type: ignore[misc]  # keras has no types
    """Hands a logger what steps and epochs report.

    Steps are counted from the optimizer's count on, so that a second fit of a model continues the
    axis of the first.

    Args:
      logger: A logger of functrain.
    """

    def __init__(self, logger: Logger) -> None:
        super().__init__()
        self.logger = logger
        self.resume_key = f"{type(logger).__name__}({getattr(logger, 'resume_key', '')})"
        self._steps_before: int | None = None  # that the model had taken when the fit began
        self._steps = 0  # of the fit

    def on_train_begin(self, logs: Any = None) -> None:
        """Begins, where a checkpoint has not said at which step."""
        if self._steps_before is None:
            self._steps_before = _steps_taken(self.model)
        if _is_first_process():
            self.logger.begin()

    def take(self, event: LogsReady) -> None:
        """Logs what the steps of a chunk reported."""
        self._steps = event.step
        if _is_first_process():
            # Callbacks of Keras see nested logs under their last name.
            logs = {name.rpartition("/")[-1]: values for name, values in event.logs.items()}
            position = self._position(event.epoch)
            self.logger.logs(dataclasses.replace(event, position=position, logs=logs))

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        """Logs the values of an epoch, those of its evaluation as well."""
        if _is_first_process():
            values = dict(logs or {})
            self.logger(EpochEnd(position=self._position(epoch), state=(), values=values))

    def state(self) -> dict[str, Any]:
        """Returns what to save."""
        return {
            "steps_before": self._steps_before,
            "steps": self._steps,
            "logger": self.logger.state(),
        }

    def restore(self, state: dict[str, Any]) -> None:
        """Continues where `state` was returned; to be called before the fit begins."""
        self._steps_before, self._steps = state["steps_before"], state["steps"]
        if _is_first_process():  # all processes may see the logger's file
            self.logger.restore(state["logger"])

    def close(self) -> None:
        """Ends; to be called however the fit ended."""
        self._steps_before = None
        if _is_first_process():
            self.logger.close()

    def _position(self, epoch: int) -> Position:
        assert self._steps_before is not None, "on_train_begin comes first"
        return Position(self._steps_before + self._steps, epoch)


def _is_first_process() -> bool:
    return jax.process_index() == 0


def _steps_taken(model: keras.Model) -> int:
    """Returns how many steps the optimizer of a model has taken."""
    optimizer = getattr(model, "optimizer", None)
    if optimizer is None:
        return 0
    # An update takes so many steps.
    steps_per_update = getattr(optimizer, "gradient_accumulation_steps", None) or 1
    return int(keras.ops.convert_to_numpy(optimizer.iterations)) * steps_per_update
