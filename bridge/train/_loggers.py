"""functrain's loggers, such as `functrain.hooks.TensorBoard`, as Keras callbacks."""

from typing import Any

import jax
import keras

from bridge.optim._optimizers import step_counter
from functrain import Position
from functrain.events import ChunkEnd, EpochEnd
from functrain.internal import Logger


def wrap_loggers(callbacks: Any) -> Any:
    """Returns callbacks with each logger of functrain wrapped in a `LoggerCallback`."""

    def wrap(callback: Any) -> Any:
        # A CSVLogger has a trigger, and Keras's callbacks have nothing that would ask it.
        is_logger = isinstance(callback, Logger) and not hasattr(callback, "every")
        return LoggerCallback(callback) if is_logger else callback

    return keras.tree.map_structure(wrap, callbacks)


def loggers_among(callbacks: Any) -> list["LoggerCallback"]:
    """Returns the wrapped loggers among callbacks."""
    flat = keras.tree.flatten(getattr(callbacks, "callbacks", callbacks))
    return [callback for callback in flat if isinstance(callback, LoggerCallback)]


class LoggerCallback(keras.callbacks.Callback):  # type: ignore[misc]  # keras has no types
    """A callback that passes the logs of steps and epochs to a logger of functrain.

    Steps are counted from the optimizer's count, so that a second fit of a model continues the
    axis of the first.

    Args:
      logger: A logger of functrain.
    """

    def __init__(self, logger: Logger) -> None:
        super().__init__()
        self.logger = logger
        self.resume_key = f"{type(logger).__name__}({getattr(logger, 'resume_key', '')})"
        # Steps that the model had taken when the fit began, and steps of the fit.
        self._steps_before: int | None = None
        self._steps = 0

    def on_train_begin(self, logs: Any = None) -> None:
        """Opens the logger, and notes the first step unless a checkpoint has restored it."""
        if self._steps_before is None:
            self._steps_before = _steps_taken(self.model)
        if _is_first_process():
            self.logger.begin()

    def take(self, event: ChunkEnd) -> None:
        """Logs what the steps of a chunk report."""
        self._steps = event.step
        if _is_first_process():
            # Nested logs have their last name only, as in other Keras callbacks.
            rows = {name.rpartition("/")[-1]: x for name, x in event.host_logs().items()}
            position, steps = self._position(event.epoch), event.steps
            self.logger.logs(
                ChunkEnd(
                    position=position, state=(), steps=steps, examples=event.examples, rows=rows
                )
            )

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        """Logs the values of an epoch, including those of its evaluation."""
        if _is_first_process():
            values = dict(logs or {})
            self.logger(EpochEnd(position=self._position(epoch), state=(), values=values))

    def state(self) -> dict[str, Any]:
        """Returns the state to save."""
        return {
            "steps_before": self._steps_before,
            "steps": self._steps,
            "logger": self.logger.state(),
        }

    def restore(self, state: dict[str, Any]) -> None:
        """Restores what `state` returned. Call it before the fit begins."""
        self._steps_before, self._steps = state["steps_before"], state["steps"]
        # All processes may see the logger's file, and restoring it truncates it.
        if _is_first_process():
            self.logger.restore(state["logger"])

    def close(self) -> None:
        """Closes the logger. Call it however the fit ends."""
        self._steps_before = None
        if _is_first_process():
            self.logger.close()

    def _position(self, epoch: int) -> Position:
        assert self._steps_before is not None, "on_train_begin comes first"
        return Position(self._steps_before + self._steps, epoch)


# All processes have the same logs, so one of them writes.
def _is_first_process() -> bool:
    return jax.process_index() == 0


def _steps_taken(model: keras.Model) -> int:
    """Returns the number of steps that the model's optimizer has taken."""
    optimizer = getattr(model, "optimizer", None)
    return 0 if optimizer is None else int(step_counter(optimizer).value)
