"""Data without end: passes one after the other, cut into stretches of equally many batches."""

from collections.abc import Iterator
from typing import Any

from functrain.common._types import PyTree
from functrain.data._sources import Pass, Source
from functrain.data._stacks import Spec, Stack


class Repeated(Source):
    """Data that are passed over as often as it takes; a stretch of batches is what epochs are.

    Args:
      data: An `ArrayLoader`, or an iterable of batches, which may have no end.
      stretch: Batches in each stretch. A smaller one at the end of a pass counts as well.
      name: Of the argument, for errors.
    """

    def __init__(self, data: Any, stretch: int, name: str = "data") -> None:
        super().__init__(data, name)
        self._once, self._stretch = Source(data, name), stretch
        # The pass that is under way, its number, and that of the batch where its part begins.
        self._now: Pass | None = None
        self._number, self._batch = 0, 0
        self._part: _Part | None = None
        self._is_restored = False

    @property
    def steps(self) -> int:
        """Batches in a stretch."""
        return self._stretch

    @property
    def full_steps(self) -> int:
        """Those that follow each other without a smaller one, as far as is known."""
        return min(self._once.full_steps or self._stretch, self._stretch)

    def require_passes(self, epochs: int) -> None:
        """Asks for nothing: an iterator may last."""

    def passes(self, epoch: int, batch: int = 0) -> Iterator[Pass]:
        """Yields the passes, or parts of them, that make up a stretch from a batch of it on."""
        left = self._stretch - batch
        now = self._now
        if now is None or self.can_seek:
            now = self._begin_after(self._steps_before + epoch * self._stretch + batch)
        while True:
            self._now, self._part = now, (part := _Part(now, left))
            yield part
            left, self._batch = left - part.taken, self._batch + part.taken
            self._part = None
            if not left:
                return
            if self.is_iterator or not self._batch:
                raise ValueError(
                    f"{self.name}: expected {left} more batches in epoch {epoch}, got the end "
                    f"after {self._batch}. An iterator is exhausted after one pass: pass something "
                    "that can be iterated again, or that has no end."
                )
            self._number, self._batch = self._number + 1, 0
            now = self._once.begin(self._number)

    def _begin_after(self, step: int) -> Pass:
        """Begins where a checkpoint was, or after so many batches."""
        if not self._is_restored:
            length = self._once.steps
            self._number, self._batch = divmod(step, length) if length else (0, step)
        self._is_restored = False
        return self._once.begin(self._number, self._batch)

    def fingerprint(self) -> dict[str, Any]:
        """Returns what tells these data from others."""
        return {**self._once.fingerprint(), "eval_every": self._stretch}

    def watch(self) -> None:
        """Has the data asked where they are from now on."""
        self._once.watch()

    def state(self, over: bool) -> dict[str, Any] | None:
        """Returns where the data are; the end of a stretch is in the midst of a pass."""
        inner = self._once.state(over=False)
        if inner is None and not self._steps_before:
            return None
        at = self._batch + (0 if self._part is None else self._part.taken)
        place = {"pass": self._number, "batch": at, "source": inner}
        return {**place, "steps_before": self._steps_before}

    def restore(self, state: dict[str, Any] | None, epoch: int, batch: int) -> list[str]:
        """Has the next stretch go on where `state` was returned; returns how the data differ."""
        # Checkpoints of functrain 0.2 do not have it: orders began with the first one.
        self._steps_before = 0 if state is None else state.get("steps_before", 0)
        if state is None:
            return []
        self._number, self._batch = state["pass"], state["batch"]
        self._is_restored = not self.can_seek
        return self._once.restore(state["source"], self._number, self._batch)


class _Part:
    """The next batches of a pass, at most so many."""

    def __init__(self, whole: Pass, left: int) -> None:
        self._whole, self._left = whole, left
        self.taken = 0

    @property
    def knows_sizes(self) -> bool:
        return self._whole.knows_sizes

    def usual(self) -> tuple[Spec, PyTree] | None:
        return self._whole.usual()

    def spec(self) -> Spec | None:
        return self._whole.spec() if self.taken < self._left else None

    def peek(self) -> PyTree:
        return self._whole.peek()

    def take(self, most: int, k: int) -> Stack:
        stack = self._whole.take(min(most, self._left - self.taken), k)
        self.taken += stack.steps
        return stack
