"""Losses that are not finite: the first step that had one, and what to do next."""

import warnings
from collections.abc import Mapping
from typing import Any

import numpy as np

from functrain.common._gather import fetch_global
from functrain.engine._position import Position
from functrain.loop._events import LogsReady

_SKIPPED = "skipped_in_a_row"


class LossWatch:
    """Remembers the first step of a run whose loss was not finite, of each member of a population.

    Steps that `functrain.tx.skip_non_finite` left out do not count. Losses are the logs whose name
    ends with ``loss``.

    Attributes:
      first: By the number of the member, 0 where there is but one model: the position of that
        step, with the number of its batch from 0 on.
    """

    def __init__(self) -> None:
        self.first: dict[int, Position] = {}
        self._name = "loss"

    def logs(self, event: LogsReady) -> None:
        """Looks at the steps of a chunk."""
        skipped = [x > 0 for name, x in event.logs.items() if name.endswith(_SKIPPED)]
        for name, losses in event.logs.items():
            if not name.endswith("loss") or np.isfinite(losses.astype(np.float64)).all():
                continue
            is_bad = ~np.isfinite(losses.astype(np.float64))
            for was_skipped in skipped:
                is_bad &= ~was_skipped
            self._note(event, name, is_bad.reshape(event.steps, -1))

    def _note(self, event: LogsReady, name: str, is_bad: np.ndarray) -> None:
        step, epoch, batch = event.position
        step, batch = step - event.steps, batch - event.steps  # before the chunk
        for member in np.flatnonzero(is_bad.any(0)).tolist():
            if member not in self.first:
                i = int(is_bad[:, member].argmax())
                self.first[member] = Position(step + i + 1, epoch, max(0, batch + i))
                self._name = name

    def warn(self, *, by_epochs: bool, epochs_before: int = 0, active: Any = None) -> None:
        """Warns of that step, if there is one.

        Args:
          by_epochs: True where an epoch is a pass over the data, so that its batch can be named.
          epochs_before: The number of the loader's epochs that came before the run's first one.
          active: `bool[N]`, the members of a population that are trained still: those that have
            been stopped report NaN since then.
        """
        first = self.first
        if first and active is not None:
            is_active = fetch_global(active)
            first = {i: position for i, position in first.items() if is_active[i]}
        if not first:
            return
        step, epoch, batch = min(first.values())
        members = "" if active is None else f" of members {sorted(first)}"
        of_loader = f" (the loader's epoch {epochs_before + epoch})" if epochs_before else ""
        place = f", batch {batch} of epoch {epoch}{of_loader}, counted from 0" if by_epochs else ""
        warnings.warn(
            f"{self._name}: expected finite numbers, got NaN or infinity{members}, first in step "
            f"{step}{place}. functrain.inspect.explain_nan(state, step, batch) names the "
            "operation that made it: pass the state before that step, and its batch.",
            stacklevel=4,  # the line that called fit
        )

    def state(self) -> dict[str, Any]:
        """Returns what to save beside the state of the run."""
        first = {str(member): list(position) for member, position in self.first.items()}
        return {"name": self._name, "first": first}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Puts back what `state` returned."""
        self._name = state["name"]
        self.first = {int(i): Position(*position) for i, position in state["first"].items()}


def warn_of_loss(values: Mapping[str, Any], active: Any = None, *, stacklevel: int) -> bool:
    """Warns if the loss of an evaluation is not finite; returns True if it has warned.

    Args:
      values: The evaluation's values.
      active: `bool[N]`, the members of a population that have not been stopped; others may have
        diverged.
      stacklevel: The line that the warning shows, as in ``warnings.warn`` called in the caller.
    """
    is_bad = ~np.isfinite(values.get("loss", 0.0))
    if active is not None:
        is_bad = is_bad & fetch_global(active)
    if not is_bad.any():
        return False
    members = f" of members {np.flatnonzero(is_bad).tolist()}" if is_bad.ndim else ""
    warnings.warn(
        f"evaluate: expected a finite loss, got NaN or infinity{members}. Evaluate the batches one "
        "by one, functrain.evaluate(state, step, [batch]), to find the first that has it; "
        "functrain.inspect.explain_nan(state, step, batch) names the operation that made it.",
        stacklevel=stacklevel + 1,
    )
    return True
