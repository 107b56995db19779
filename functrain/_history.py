"""What a fit reported: every step, every epoch, and a picture."""

import collections
import dataclasses
import os
from typing import TYPE_CHECKING, Any

import jax
import numpy as np

from functrain import _tree
from functrain._run import ChunkEnd
from functrain._types import PyTree

if TYPE_CHECKING:
    from matplotlib.figure import Figure


@dataclasses.dataclass(frozen=True)
class History:
    """What a fit reported.

    Attributes:
      steps: Scalar logs of every step, by name: `f32[steps]` each (in the logs' own dtype).
      epochs: Values of every epoch, by name: `f64[epochs]` each. Logs as means over the epoch's
        examples (the learning rate as it was last), metrics, evaluations under ``val_``, and
        ``seconds``.

    Examples:
      >>> history = History(steps={"loss": np.array([3.0, 1.0])}, epochs={"loss": np.array([2.0])})
      >>> history.steps["loss"][-1].item()
      1.0
    """

    steps: dict[str, np.ndarray]
    epochs: dict[str, np.ndarray]

    def plot(self, path: str | os.PathLike[str] | None = None) -> "Figure":
        """Draws the learning curves, one panel for each quantity; needs matplotlib.

        Args:
          path: Where to save the picture as well, such as ``curves.png``.

        Returns:
          The matplotlib Figure.

        Raises:
          ImportError: matplotlib is not installed.
        """
        from functrain._plot import draw

        figure = draw(self)
        if path is not None:
            figure.savefig(path, dpi=120)
        return figure


class Recorder:
    """Gathers logs without making the device wait: each chunk's are fetched one chunk late."""

    def __init__(self) -> None:
        self._due: collections.deque[tuple[int, PyTree]] = collections.deque()
        self._steps: dict[str, list[np.ndarray]] = {}
        self._epochs: dict[str, list[float]] = {}
        self._epoch: dict[str, list[np.ndarray]] = {}
        self._weights: list[np.ndarray] = []
        self.latest: dict[str, float] = {}

    def add(self, event: ChunkEnd) -> None:
        """Takes in a chunk's logs; fetches those of the one before."""
        scalars = {path: x for path, x in _tree.leaves_with_path(event.logs) if np.ndim(x) == 1}
        self._due.append((event.examples, dict(sorted(scalars.items(), key=_rank))))
        if len(self._due) > 1:
            self._fetch()

    def end_epoch(self, metrics: dict[str, float]) -> dict[str, float]:
        """Fetches what is left; returns the epoch's means over its examples, and its metrics."""
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

    def add_epoch(self, values: dict[str, float], seconds: float) -> None:
        """Takes in the values of an epoch, and how long it took in seconds."""
        for name, value in {**values, "seconds": seconds}.items():
            self._epochs.setdefault(name, []).append(value)

    def history(self) -> History:
        """Returns everything so far."""
        return History(
            steps={name: np.concatenate(parts) for name, parts in self._steps.items()},
            epochs={name: np.array(values) for name, values in self._epochs.items()},
        )

    def _fetch(self) -> None:
        examples, logs = self._due.popleft()
        host = dict(zip(logs, jax.device_get(list(logs.values())), strict=True))
        for name, values in host.items():
            self._steps.setdefault(name, []).append(values)
            self._epoch.setdefault(name, []).append(values)
            self.latest[name] = float(values[-1])
        if host:
            self._weights.append(np.full(len(next(iter(host.values()))), examples))


def _rank(item: tuple[str, Any]) -> tuple[int, str]:
    """Sorts the loss first and the learning rate last."""
    name = item[0].split("/")[-1]
    return {"loss": 0, "learning_rate": 2}.get(name, 1), item[0]
