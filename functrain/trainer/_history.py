"""What a fit reported: every step, every epoch, and a picture."""

import collections
import dataclasses
import os
import time
from typing import TYPE_CHECKING, Any

import jax
import numpy as np

from functrain.common import _tree
from functrain.loop._run import ChunkEnd, EpochEnd, Event

if TYPE_CHECKING:
    from matplotlib.figure import Figure


@dataclasses.dataclass(frozen=True)
class History:
    """What a fit reported.

    Attributes:
      steps: Scalar logs of every step, by name: `f32[steps]` each (in the logs' own dtype).
      epochs: Values of every epoch, by name: `f64[epochs]` each, NaN where an epoch has none.
        Logs as means over the epoch's examples (the learning rate as it was last), metrics,
        evaluations under ``val_``, and ``seconds``.
      points: Values that hooks added within epochs, by name: ``(steps i64[n], values f64[n])``.
      first_steps_seconds: Time until the first program had run: mostly that of compiling it.

    Examples:
      >>> history = History(steps={"loss": np.array([3.0, 1.0])}, epochs={"loss": np.array([2.0])})
      >>> history.steps["loss"][-1].item()
      1.0
    """

    steps: dict[str, np.ndarray]
    epochs: dict[str, np.ndarray]
    points: dict[str, tuple[np.ndarray, np.ndarray]] = dataclasses.field(default_factory=dict)
    first_steps_seconds: float = float("nan")

    def plot(self, path: str | os.PathLike[str] | None = None) -> "Figure":
        """Draws the learning curves, one panel for each quantity; needs matplotlib.

        Args:
          path: Where to save the picture as well, such as ``curves.png``.

        Returns:
          The matplotlib Figure.

        Raises:
          ImportError: matplotlib is not installed.
        """
        from functrain.trainer._plot import draw

        figure = draw(self.steps, self.epochs)
        if path is not None:
            figure.savefig(path, dpi=120)
        return figure


class Recorder:
    """Gathers what a run reports, without making the device wait.

    Each chunk's logs are fetched one chunk late, when they have long been there; only the very
    first chunk is waited for, to know how long it took.
    """

    def __init__(self) -> None:
        self._due: collections.deque[tuple[ChunkEnd, dict[str, Any]]] = collections.deque()
        self._steps: dict[str, list[np.ndarray]] = {}
        self._epochs: list[dict[str, float]] = []
        self._points: dict[str, list[tuple[int, float]]] = {}
        self._epoch: dict[str, list[np.ndarray]] = {}
        self._weights: list[np.ndarray] = []
        self._names: dict[Any, list[tuple[str, int]]] = {}
        self._began = self._epoch_began = time.perf_counter()
        self.first_steps_seconds = float("nan")
        self.latest: dict[str, float] = {}

    def before(self, event: Event) -> None:
        """Takes in a chunk's logs; puts an epoch's means and metrics into its event."""
        if isinstance(event, ChunkEnd):
            self._add(event)
        elif isinstance(event, EpochEnd):
            event.values |= self._end_epoch(_tree.to_floats(event.metrics()))

    def after(self, event: Event) -> None:
        """Keeps the event's values, with what hooks have added."""
        for name, value in event.values.items():
            if np.ndim(value):
                raise TypeError(
                    f"event.values[{name!r}]: expected a number, got {_tree.spec(value)}. Arrays "
                    "have no place in the history: keep them in the hook."
                )
        if isinstance(event, EpochEnd):
            now = time.perf_counter()
            self._epochs.append({**event.values, "seconds": now - self._epoch_began})
            self._epoch_began = now
        else:
            for name, value in event.values.items():
                self._points.setdefault(name, []).append((event.step, value))

    def history(self) -> History:
        """Returns everything so far."""
        while self._due:
            self._fetch()
        names = list(dict.fromkeys(name for values in self._epochs for name in values))
        nan = float("nan")
        return History(
            steps={name: np.concatenate(parts) for name, parts in self._steps.items()},
            epochs={n: np.array([values.get(n, nan) for values in self._epochs]) for n in names},
            points={
                name: (np.array([s for s, _ in pairs]), np.array([v for _, v in pairs]))
                for name, pairs in self._points.items()
            },
            first_steps_seconds=self.first_steps_seconds,
        )

    def _add(self, event: ChunkEnd) -> None:
        leaves, structure = jax.tree.flatten(event.rows)
        if structure not in self._names:  # once: paths are slow, and the same each time
            paths = [path for path, _ in _tree.leaves_with_path(event.rows)]
            known = [(p, i) for i, p in enumerate(paths) if leaves[i].ndim == 1]
            self._names[structure] = sorted(known, key=_rank)
        self._due.append((event, {p: leaves[i] for p, i in self._names[structure]}))
        if len(self._due) > 1:
            self._fetch()
        if np.isnan(self.first_steps_seconds):
            jax.block_until_ready(event.rows)
            self.first_steps_seconds = time.perf_counter() - self._began

    def _end_epoch(self, metrics: dict[str, float]) -> dict[str, float]:
        while self._due:
            self._fetch()
        weights = np.concatenate([*self._weights, np.empty(0)])
        means = dict(metrics)
        for name, parts in self._epoch.items():
            values = np.concatenate(parts).astype(np.float64)
            # A rate is what it is at the end; its mean over a schedule says nothing.
            last = name.split("/")[-1] == "learning_rate"
            means[name] = float(values[-1] if last else np.average(values, weights=weights))
        self._epoch, self._weights = {}, []
        return dict(sorted(means.items(), key=_rank))

    def _fetch(self) -> None:
        event, logs = self._due.popleft()
        for name, rows in zip(logs, jax.device_get(list(logs.values())), strict=True):
            values = rows[: event.steps]
            self._steps.setdefault(name, []).append(values)
            self._epoch.setdefault(name, []).append(values)
            self.latest[name] = float(values[-1])
        if logs:
            self._weights.append(np.full(event.steps, event.examples))


def _rank(item: tuple[str, Any]) -> tuple[int, str]:
    """Sorts the loss first and the learning rate last."""
    name = item[0].split("/")[-1]
    return {"loss": 0, "learning_rate": 2}.get(name, 1), item[0]
