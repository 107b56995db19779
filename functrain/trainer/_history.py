"""What a fit reported: every step, every epoch, and a picture."""

import dataclasses
import os
from typing import TYPE_CHECKING

import numpy as np

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
