"""Epochs with a given number of batches, regardless of the length of the data."""

from typing import Any

from functrain.common._types import PyTree
from functrain.data._batches import Batches, Chunk, ShortPassError


class EpochsOfSteps(Batches):
    """Epochs with the same number of batches, over as many passes over the data as it takes.

    A smaller batch at the end of a pass counts as one batch.

    Args:
      batches: The batches of the data, which may be endless.
      steps: Batches in each epoch. None makes one epoch, which lasts to the end of the training.
      total: Batches in the training, if the caller counts them.
      steps_before: Data that can seek continue after this number of earlier steps.

    Attributes:
      steps: Batches in each epoch.
      full_steps: The most batches of full size that follow one another within an epoch.
      total: As passed.
    """

    def __init__(
        self, batches: Batches, steps: int | None, total: int | None = None, steps_before: int = 0
    ) -> None:
        self._inner, self.data, self.name = batches, batches.data, batches.name
        self.can_seek = batches.can_seek
        self.total, self._steps_per_epoch = total, steps
        length = total if steps is None else steps
        assert length is not None, "expected the steps of an epoch or of the training"
        self._set_length(length)
        # The first epoch of this length, and the batches before it.
        self._first_epoch = self._first_step = 0
        # The number of the current pass over the data, None before the first one, and the batches
        # taken in it.
        self._pass: int | None = None
        self._taken = 0
        # Batches of the epoch that are still to be taken.
        self._remaining = 0
        # Counted here, not by the inner batches, whose passes are numbered from the first step.
        self._steps_before = steps_before if self.can_seek else 0

    def _set_length(self, steps: int) -> None:
        self.steps: int = steps
        self.full_steps = min(self._inner.full_steps or steps, steps)

    def begin(self, epoch: int, batch: int = 0) -> None:
        """Begins an epoch; data that cannot seek continue where the previous one ended."""
        self._remaining, self._epoch = self.steps - batch, epoch
        if self._pass is None or self.can_seek:
            steps = self._first_step + (epoch - self._first_epoch) * self.steps + batch
            total, length = self._steps_before + steps, self._inner.steps
            try:
                # Without a length, the data count as one pass that has not ended.
                self._begin_pass(*(divmod(total, length) if length else (0, total)))
            except ShortPassError as error:
                # Now the length is known. An empty pass and an iterator cannot be repeated.
                if length or self._inner.is_iterator or not error.batches:
                    raise
                self._begin_pass(*divmod(total, error.batches))

    def _begin_pass(self, number: int, taken: int = 0) -> None:
        """Begins a pass over the data at one of its batches."""
        self._pass, self._taken = number, taken
        self._inner.begin(number, taken)

    def peek(self) -> PyTree | None:
        """Returns the next batch; begins another pass over the data if one has ended."""
        if not self._remaining:
            return None
        batch = self._inner.peek()
        if batch is not None:
            return batch
        # A pass without a single batch would be followed by another one forever.
        if self._inner.is_iterator or not self._taken:
            raise ValueError(
                f"{self.name}: expected {self._remaining} more batches in epoch {self._epoch}, got "
                f"the end of the data after {self._taken}. An iterator is exhausted after one "
                "pass: pass data that can be iterated again, or that are endless."
            )
        assert self._pass is not None, "call begin first"
        self._begin_pass(self._pass + 1)
        return self.peek()

    def take(self, k: int, limit: int) -> Chunk:
        """Returns a chunk of the next batches, which ends with the epoch."""
        chunk = self._inner.take(k, min(limit, self._remaining))
        self._remaining -= chunk.steps
        self._taken += chunk.steps
        return chunk

    def first(self) -> PyTree | None:
        """Returns the first batch of the data, or its shapes; None if there is none."""
        return self._inner.first()

    def put_on_device(self, room: int) -> None:
        """Puts the data on the device."""
        self._inner.put_on_device(room)

    def known_shapes(self) -> list[PyTree]:
        """Returns the shapes of batches of the data that are known without a fetch."""
        return self._inner.known_shapes()

    def fingerprint(self) -> dict[str, Any]:
        """Returns properties that distinguish these data from others."""
        length = self._steps_per_epoch or "all steps"
        return {**self._inner.fingerprint(), "steps_per_epoch": length}

    def continue_at(self, step: int, epoch: int, batch: int, *, epoch_is_over: bool) -> int | None:
        """Makes the last epoch end with the training, which is continued after a number of steps.

        Args:
          step: Steps taken.
          epoch: The epoch that they are in.
          batch: Steps taken in it.
          epoch_is_over: True if it ended there, with the training as it was planned then.

        Returns:
          The number of epochs of the training; None if epochs have a given length.
        """
        if self._steps_per_epoch is not None:
            return None
        assert self.total is not None, "without a length of epochs, the training has one"
        if epoch_is_over and step < self.total:
            epoch, batch = epoch + 1, 0
        self._first_epoch, self._first_step = epoch, step - batch
        self._set_length(self.total - self._first_step)
        # More steps were taken than the training has: it ended before this epoch.
        return epoch if step > self.total else epoch + 1

    def track(self) -> None:
        """Begins to track the position in the data."""
        self._inner.track()

    def state(self, *, epoch_is_over: bool) -> dict[str, Any]:
        """Returns the number of the pass, the batches taken in it, and the data's position."""
        return {
            "pass": self._pass,
            "taken": self._taken,
            # The end of an epoch is in the middle of a pass.
            "batches": self._inner.state(epoch_is_over=False),
            "steps_before": self._steps_before,
        }

    def restore(self, state: Any, epoch: int, batch: int) -> list[str]:
        """Continues in the pass of the saved run."""
        self._steps_before = state["steps_before"]
        # `begin` computes the position of data that can seek from the epoch and the batch.
        if self.can_seek:
            return self._inner.restore(state["batches"], epoch, batch)
        position = state["pass"], state["taken"]
        changed = self._inner.restore(state["batches"], *position)
        if not changed:
            self._begin_pass(*position)
        return changed
