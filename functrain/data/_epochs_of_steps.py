"""Epochs of a given number of batches, however long the data are."""

from typing import Any

from functrain.common._types import PyTree
from functrain.data._batches import Batches, Chunk, WrappedBatches


class EpochsOfSteps(WrappedBatches):
    """Epochs of equally many batches, of data that are passed over as often as it takes.

    A smaller batch at the end of a pass over the data counts as one batch.

    Args:
      batches: Of the data, which may have no end.
      steps: Batches in each epoch.
    """

    def __init__(self, batches: Batches, steps: int) -> None:
        super().__init__(batches)
        self.steps: int = steps
        # The pass that is under way, and the batches taken in it. None: not begun yet.
        self._pass: int | None = None
        self._taken = self._left = 0
        self._steps_before = 0

    @property
    def full_steps(self) -> int:
        """Batches that follow one another without a smaller one, as far as that is known."""
        return min(self._inner.full_steps or self.steps, self.steps)

    def begin(self, epoch: int, batch: int = 0) -> None:
        """Begins an epoch; data that cannot seek continue where the last one ended."""
        self._left, self._epoch = self.steps - batch, epoch
        if self._pass is None or self.can_seek:
            taken, length = self._steps_before + epoch * self.steps + batch, self._inner.steps
            self._pass, self._taken = divmod(taken, length) if length else (0, taken)
            self._inner.begin(self._pass, self._taken)

    def peek(self) -> PyTree | None:
        """Returns the next batch, of the next pass over the data where one has ended."""
        if not self._left:
            return None
        batch = self._inner.peek()
        if batch is not None:
            return batch
        if self.is_iterator or not self._taken:
            raise ValueError(
                f"{self.name}: expected {self._left} more batches in epoch {self._epoch}, got the "
                f"end after {self._taken}. An iterator is exhausted after one pass: pass something "
                "that can be iterated again, or that has no end."
            )
        assert self._pass is not None, "begin comes first"
        self._pass, self._taken = self._pass + 1, 0
        self._inner.begin(self._pass)
        return self.peek()

    def take(self, k: int, limit: int) -> Chunk:
        """Returns a chunk of the next batches, which ends with the epoch."""
        chunk = self._inner.take(k, min(limit, self._left))
        self._left -= chunk.steps
        self._taken += chunk.steps
        return chunk

    def fingerprint(self) -> dict[str, Any]:
        """Returns what tells these data from others."""
        return {**self._inner.fingerprint(), "eval_every": self.steps}

    def state(self, *, epoch_is_over: bool) -> dict[str, Any]:
        """Returns the pass, the batches taken in it, and the position of the data."""
        return {
            "pass": self._pass,
            "taken": self._taken,
            # An epoch ends in the middle of a pass.
            "batches": self._inner.state(epoch_is_over=False),
            "steps_before": self._steps_before,
        }

    def restore(self, state: Any, epoch: int, batch: int) -> list[str]:
        """Continues in the pass that was under way."""
        self._steps_before = state["steps_before"]
        if self.can_seek:  # the epoch and the batch say where
            return self._inner.restore(state["batches"], epoch, batch)
        self._pass, self._taken = state["pass"], state["taken"]
        changed = self._inner.restore(state["batches"], self._pass, self._taken)
        if not changed:
            self._inner.begin(self._pass, self._taken)
        return changed

    def continue_after(self, steps: int) -> None:
        """Has a loader continue with the batches that come after so many steps."""
        self._steps_before = steps if self.can_seek else 0

    @property
    def epochs_before(self) -> int:
        """0: its epochs are not those of a loader."""
        return 0

    def require_epochs(self, epochs: int) -> None:
        """Raises nothing: an iterator may last for several epochs."""
