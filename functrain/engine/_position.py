"""The progress of a training: step, epoch and batch."""

from typing import Any, NamedTuple, Self

from functrain.common import _repr
from functrain.common._checks import is_integer, require, require_integer


class Position(NamedTuple):
    """The progress of a training, counted from its very beginning, across resumes.

    Attributes:
      step: Steps taken.
      epoch: Number of the epoch, from 0.
      batch: Batches taken in that epoch.

    Examples:
      >>> Position(step=25, epoch=2, batch=5)
      Position(step=25, epoch=2, batch=5)
      >>> Position.from_step(step=25, steps_per_epoch=10)
      Position(step=25, epoch=2, batch=5)
    """

    step: int = 0
    epoch: int = 0
    batch: int = 0

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


def require_position(start: object, name: str = "start") -> Position:
    """Returns the position to start from, as Python's integers: the beginning for None.

    Raises:
      TypeError: `start` is not a Position.
      ValueError: A part is not a number from 0 on, or there are more batches than steps.
    """
    if start is None:
        return Position()
    advice = (
        "For an array, pass int(state.step). If all epochs of the training have the same length, "
        "pass functrain.Position.from_step(step=int(state.step), steps_per_epoch=len(loader))."
    )
    if not isinstance(start, Position):
        expected = "a functrain.Position(step, epoch, batch)"
        raise TypeError(f"{name}: expected {expected}, got {_repr.brief(start)}. {advice}")
    is_valid = all(is_integer(part, 0) for part in start) and start.batch <= start.step
    expected = "whole numbers, and no more batches in the epoch than steps in all"
    require(is_valid, name, expected, start, advice)
    return Position(*map(int, start))


def as_position(state: Any, position: Position | int | None) -> Position:
    """Returns a position from one, from its step, or from the `step` of a state."""
    if position is None:
        step: Any = getattr(state, "step", None)
        advice = "Pass one, because the state has no step."
        require(step is not None, "position", "a functrain.Position or a step", None, advice)
        position = int(step)
    if is_integer(position, 0):
        position = Position(position)
    return require_position(position, "position")
