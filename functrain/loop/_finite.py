"""Warnings about losses that are not finite, with the first such step."""

import dataclasses
from collections.abc import Mapping
from typing import Any

import numpy as np

from functrain.common._gather import fetch_global
from functrain.common._log_values import SkippedInARow, related
from functrain.common._warnings import warn
from functrain.engine._position import Position
from functrain.loop._events import ChunkEnd


@dataclasses.dataclass(eq=False)
class LossWatch:
    """Stores the first step of a run whose loss was not finite, for each member of a population.

    Steps that `functrain.tx.skip_non_finite` skipped do not count. Losses are the logs whose name
    ends with ``loss``.

    Attributes:
      first: The position of that step by the index of the member, 0 for a single model. Its batch
        is counted from 0.
      last_finite: The last step whose losses were finite, at least for one member; None before it.
    """

    first: dict[int, Position] = dataclasses.field(default_factory=dict)
    last_finite: int | None = None
    # The name of the loss that was not finite.
    _name: str = "loss"
    _has_warned: bool = False

    def logs(self, event: ChunkEnd) -> None:
        """Checks the steps of a chunk."""
        logs = event.host_logs()
        names = [name for name in logs if name.endswith("loss")]
        is_finite = np.ones(event.steps, bool)
        for name in names:
            is_bad = ~np.isfinite(logs[name].astype(np.float64))
            # The loop calls this for every chunk, and nearly all losses are finite.
            for count in related(name, SkippedInARow, logs) if is_bad.any() else ():
                is_bad &= ~(logs[count] > 0)
            if is_bad.any():
                is_bad = is_bad.reshape(event.steps, -1)
                is_finite &= ~is_bad.all(axis=1)
                self._store_first(event, name, is_bad)
        if names and is_finite.any():
            last = int(np.flatnonzero(is_finite)[-1])
            self.last_finite = event.position.step - event.steps + 1 + last

    def _store_first(self, event: ChunkEnd, name: str, is_bad: np.ndarray) -> None:
        """Stores the first bad step of each member; `is_bad` is `bool[steps, N]`."""
        if not self.first:
            self._name = name
        # The event has the position at the end of the chunk.
        step, epoch, batch = event.position
        for member in np.flatnonzero(is_bad.any(0)).tolist():
            later = int(is_bad[:, member].argmax()) - event.steps
            position = Position(step + later + 1, epoch, max(0, batch + later))
            self.first.setdefault(member, position)

    def warn(self, *, by_epochs: bool, epochs_before: int = 0, active: Any = None) -> None:
        """Warns of that step, if there is one, once.

        Args:
          by_epochs: True if an epoch is a pass over the data, so that the batch can be named.
          epochs_before: The number of the loader's epochs before the first epoch of the run.
          active: `bool[N]`, True for the members of a population that are still trained. Stopped
            members report NaN.
        """
        first = self.first
        if first and active is not None:
            is_active = fetch_global(active)
            first = {i: position for i, position in first.items() if is_active[i]}
        if not first or self._has_warned:
            return
        self._has_warned = True
        step, epoch, batch = min(first.values())
        members = "" if active is None else f" of members {sorted(first)}"
        loader_epoch = f" (the loader's epoch {epochs_before + epoch})" if epochs_before else ""
        place = ""
        if by_epochs:
            place = f", batch {batch} of epoch {epoch}{loader_epoch}, counted from 0"
        warn(
            f"{self._name}: expected finite numbers, got NaN or infinity{members}, first in step "
            f"{step}{place}. functrain.inspect.explain_nan(state, step, batch) names the "
            "operation that made it: pass the state before that step, and its batch. If that state "
            "holds NaN already, the gradient of the step before made it: go back one step. "
            "functrain.fit(..., steps=) computes that state, from the last checkpoint before it."
        )

    def state(self) -> dict[str, Any]:
        """Returns the first steps, for the checkpoint."""
        first = {str(member): list(position) for member, position in self.first.items()}
        return {"name": self._name, "first": first, "last_finite": self.last_finite}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Restores what `state` returned."""
        self._name, self.last_finite = state["name"], state["last_finite"]
        self.first = {int(i): Position(*position) for i, position in state["first"].items()}
