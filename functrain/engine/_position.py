"""Where a training is."""

from typing import NamedTuple, Self

from functrain.common._checks import is_integer, require, require_integer


class _Parts(NamedTuple):
    step: int
    epoch: int
    batch: int


class Position(_Parts):
    """How far a training has come, counted from its very beginning, through every resume.

    Attributes:
      step: Steps taken.
      epoch: Number of the epoch, from 0.
      batch: Batches taken in that epoch.

    Raises:
      ValueError: A part is not a whole number, or is negative.

    Examples:
      >>> Position(step=25, epoch=2, batch=5)
      Position(step=25, epoch=2, batch=5)
      >>> Position.of(step=25, steps_per_epoch=10)
      Position(step=25, epoch=2, batch=5)
    """

    __slots__ = ()

    # A NamedTuple cannot check its fields by itself.
    def __new__(cls, step: int = 0, epoch: int = 0, batch: int = 0) -> Self:
        """Checks the parts, and makes Python integers of them."""
        for name, value in (("step", step), ("epoch", epoch), ("batch", batch)):
            if not is_integer(value, 0):  # the name is made only where it is needed: loops are fast
                require_integer(f"Position: {name}", value, 0, "Of an array: int(state.step).")
        return super().__new__(cls, int(step), int(epoch), int(batch))

    @classmethod
    def of(cls, step: int, steps_per_epoch: int) -> Self:
        """Returns the position after so many steps, where all epochs have the same length.

        Args:
          step: Steps taken, such as ``int(state.step)``.
          steps_per_epoch: Such as ``len(loader)``.

        Raises:
          ValueError: `steps_per_epoch` is below 1.
        """
        require_integer("steps_per_epoch", steps_per_epoch)
        return cls(int(step), *divmod(int(step), int(steps_per_epoch)))

    def after(self, steps: int) -> "Position":
        """Returns the position so many steps later in the same epoch."""
        return Position(self.step + steps, self.epoch, self.batch + steps)


def require_position(start: object) -> Position:
    """Returns where to start: the beginning for None.

    Raises:
      TypeError: It is no Position.
      ValueError: There are more batches in the epoch than steps.
    """
    if start is None:
        return Position()
    if not isinstance(start, Position):
        raise TypeError(
            f"start: expected a functrain.Position(step, epoch, batch), got {start!r}. For a "
            "state of a training with epochs of one length: functrain.Position.of("
            "step=int(state.step), steps_per_epoch=len(loader))."
        )
    expected = "no more batches in the epoch than steps in all"
    require(start.batch <= start.step, "start", expected, start)
    return start
