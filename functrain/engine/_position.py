"""The progress of a training: step, epoch and batch."""

from typing import Any, NamedTuple, Self

from functrain.common._checks import is_integer, require, require_integer


class _Parts(NamedTuple):
    step: int
    epoch: int
    batch: int


class Position(_Parts):
    """The progress of a training, counted from its very beginning, across resumes.

    Attributes:
      step: Steps taken.
      epoch: Number of the epoch, from 0.
      batch: Batches taken in that epoch.

    Raises:
      ValueError: A part is not an integer, or is negative.

    Examples:
      >>> Position(step=25, epoch=2, batch=5)
      Position(step=25, epoch=2, batch=5)
      >>> Position.from_step(step=25, steps_per_epoch=10)
      Position(step=25, epoch=2, batch=5)
    """

    __slots__ = ()

    # A NamedTuple cannot define `__new__`, so the fields are in a base class.
    def __new__(cls, step: int = 0, epoch: int = 0, batch: int = 0) -> Self:
        """Checks the parts and converts them to Python integers."""
        for name, value in (("step", step), ("epoch", epoch), ("batch", batch)):
            # The check comes before the call, since making its text costs time in every chunk.
            if not is_integer(value, 0):
                require_integer(f"Position: {name}", value, 0, "Of an array: int(state.step).")
        return super().__new__(cls, int(step), int(epoch), int(batch))

    @classmethod
    def from_step(cls, step: int, steps_per_epoch: int) -> Self:
        """Returns the position after a number of steps, if all epochs have the same length.

        Args:
          step: Steps taken, such as ``int(state.step)``.
          steps_per_epoch: Steps in every epoch, such as ``len(loader)``.

        Raises:
          ValueError: `steps_per_epoch` is below 1.
        """
        require_integer("steps_per_epoch", steps_per_epoch)
        return cls(int(step), *divmod(int(step), int(steps_per_epoch)))

    def after(self, steps: int) -> "Position":
        """Returns the position a number of steps later in the same epoch."""
        return Position(self.step + steps, self.epoch, self.batch + steps)


def require_position(start: object) -> Position:
    """Returns the position to start from: the beginning for None.

    Raises:
      TypeError: `start` is not a Position.
      ValueError: It has more batches in the epoch than steps.
    """
    if start is None:
        return Position()
    if not isinstance(start, Position):
        raise TypeError(
            f"start: expected a functrain.Position(step, epoch, batch), got {start!r}. If all "
            "epochs of the training have the same length, pass functrain.Position.from_step("
            "step=int(state.step), steps_per_epoch=len(loader))."
        )
    expected = "no more batches in the epoch than steps in all"
    require(start.batch <= start.step, "start", expected, start)
    return start


def as_position(state: Any, position: Position | int | None) -> Position:
    """Returns a position from one, from its step, or from the `step` of a state."""
    if position is None:
        step: Any = getattr(state, "step", None)
        advice = "Pass one, because the state has no step."
        require(step is not None, "position", "a functrain.Position or a step", None, advice)
        position = int(step)
    if is_integer(position, 0):
        return Position(position)
    require(
        isinstance(position, Position),
        "position",
        "a functrain.Position, or a step of at least 0",
        position,
        "Of an array: int(state.step).",
        error=TypeError,
    )
    return require_position(position)
