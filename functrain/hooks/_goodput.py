"""How the time of a run divides into steps and everything else."""

import dataclasses
import time
from typing import Any, ClassVar

from functrain.common._log_values import Unshown
from functrain.engine import _times
from functrain.engine._trigger import Every, Trigger, as_trigger
from functrain.loop._events import Event

_KINDS = ("compiling", "data", "evaluation", "saving", "stopped")


@dataclasses.dataclass(eq=False)
class Goodput:
    """A hook that says which part of the time of a run went into steps.

    It adds the parts of the time since the run began, which sum to 1, to the event's values, for
    the history and loggers. When the run ends, it prints them in one line:

    - ``goodput/compiling``: calls of the run's programs for which something was compiled;
    - ``goodput/data``: making batches while no program was running;
    - ``goodput/evaluation``: evaluations by `functrain.hooks.Evaluate`, and so by ``eval_data``;
    - ``goodput/saving``: saving as far as the run waits for it;
    - ``goodput/stopped``: in a run that was resumed, the time from the checkpoint until then. It
      contains the work that was lost, and the time in which nothing ran;
    - ``goodput/steps``: the rest, with what other hooks do.

    A run that resumes continues the sums.

    Args:
      every: A number of steps, or a trigger. The end of each epoch by default.

    Examples:
      >>> import functrain as ft, jax.numpy as jnp
      >>> def step(count, batch):
      ...     return count + 1, {"loss": jnp.sum(batch)}
      >>> data = ft.ArrayLoader(jnp.ones((64, 8)), 4)
      >>> _, history = ft.fit(0, step, data, hooks=[Goodput()], verbose=0)
      goodput ...% of ... s: compiling ...%
      >>> sorted(history.epochs)[:2]
      ['goodput/compiling', 'goodput/data']
    """

    _: dataclasses.KW_ONLY
    every: int | Trigger | None = None

    # One process reports for all.
    only_first: ClassVar[bool] = True

    def __post_init__(self) -> None:
        self.every = as_trigger(self.every, Every(epochs=1))
        self._seconds: _times.Seconds = _times.Seconds(float)
        # The seconds of the earlier runs that this one continues.
        self._earlier = 0.0
        self._start: float | None = None

    def begin(self) -> None:
        """Begins to add up."""
        self._start = time.perf_counter()
        _times.ask(self._seconds)

    def __call__(self, event: Event, /) -> None:
        """Adds the parts."""
        parts = self._parts().items()
        event.values.update({Unshown(f"goodput/{kind}"): x for kind, x in parts})

    def close(self) -> None:
        """Prints the parts, and forgets them."""
        if self._start is None:  # another hook did not begin
            return
        _times.end(self._seconds)
        parts, total = self._parts(), self._total()
        others = ", ".join(f"{kind} {100 * parts[kind]:.1f}%" for kind in _KINDS if parts[kind])
        print(f"goodput {100 * parts['steps']:.1f}% of {total:.1f} s: {others or 'nothing else'}")
        self._seconds, self._earlier, self._start = _times.Seconds(float), 0.0, None

    def state(self) -> dict[str, Any]:
        """Returns the sums, and the time of day."""
        return {"seconds": dict(self._seconds), "total": self._total(), "time": time.time()}

    def restore(self, state: dict[str, Any], /) -> None:
        """Continues the sums, and adds the time since they were saved."""
        stopped = max(0.0, time.time() - state["time"])
        self._seconds = _times.Seconds(float, state["seconds"])
        self._seconds["stopped"] += stopped
        self._earlier = state["total"] + stopped

    def _total(self) -> float:
        if self._start is None:
            return self._earlier
        return self._earlier + time.perf_counter() - self._start

    def _parts(self) -> dict[str, float]:
        total = self._total()
        parts = {kind: self._seconds[kind] / total for kind in _KINDS}
        return {**parts, "steps": 1 - sum(parts.values())}
