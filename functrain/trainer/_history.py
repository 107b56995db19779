"""What a fit reported: every step, every epoch, and a picture."""

import base64
import dataclasses
import html
import os
from collections.abc import Iterable
from typing import TYPE_CHECKING, NoReturn

import numpy as np

from functrain.common import _values
from functrain.trainer import _plot

if TYPE_CHECKING:
    from matplotlib.figure import Figure


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class History:
    """What a fit reported. ``==`` asks whether two are one object.

    Attributes:
      steps: Scalar logs of every step, by name: `f32[steps]` each (in the logs' own dtype); of a
        population `[steps, N]`, one a member, in `epochs` and `points` as well. Steps and points
        are empty with ``fit(history="epochs")``.
      epochs: Values of every epoch, by name: `f64[epochs]` each, NaN where an epoch has none.
        Logs as means over the epoch's examples (the learning rate as it was last), metrics,
        evaluations under ``val_``, and ``seconds``.
      points: Values that hooks added within epochs, by name: ``(steps i64[n], values f64[n])``.
      first_steps_seconds: Time until the first program had run, mostly to compile it: in the
        process that took the last steps.
      first_step: Steps the training had taken before those in `steps`, where the fit continued one;
        `points` count them.

    Examples:
      >>> history = History(steps={"loss": np.array([3.0, 1.0])}, epochs={"loss": np.array([2.0])})
      >>> history.steps["loss"][-1].item()
      1.0
    """

    steps: dict[str, np.ndarray]
    epochs: dict[str, np.ndarray]
    points: dict[str, tuple[np.ndarray, np.ndarray]] = dataclasses.field(default_factory=dict)
    first_steps_seconds: float = float("nan")
    first_step: int = 0

    def __repr__(self) -> str:
        kinds: dict[str, Iterable[str]] = {
            f"{_length(self.steps)} steps": self.steps,
            f"{_length(self.epochs)} epochs": self.epochs,
            "points": self.points,
        }
        parts = (f"{kind}: {', '.join(values)}" for kind, values in kinds.items() if values)
        return f"History({'; '.join(parts)})"

    @property
    def history(self) -> NoReturn:
        """Raises AttributeError: Keras's word for `epochs`."""
        raise AttributeError(
            "History has no `history`, which is Keras's word: the values of each epoch are in "
            "`history.epochs`, such as history.epochs['loss'], those of each step in "
            "`history.steps`."
        )

    def _repr_html_(self) -> str:
        said = f"<p><code>{html.escape(repr(self))}</code></p>"
        return f"<div>{said}{_table(self.epochs)}{_curves(self)}</div>"

    def plot(self, path: str | os.PathLike[str] | None = None) -> "Figure":
        """Draws the learning curves, one panel for each quantity; needs matplotlib.

        Values of steps are thin, of epochs bold, of evaluations dashed, `points` at their steps.
        Of a population the median is bold, half of the members lie in a band, each is a thin line.

        Args:
          path: Where to save the picture as well, such as ``curves.png``.

        Returns:
          The matplotlib Figure, which a notebook shows as a picture.

        Raises:
          ImportError: matplotlib is not installed.
        """
        figure = _plot.draw(self)
        if path is not None:
            figure.savefig(path, dpi=120)
        return figure


def _length(values: dict[str, np.ndarray]) -> int:
    return max(map(len, values.values()), default=0)


_FIRST, _LAST = 3, 12  # of more epochs than both, those in between are left out


def _table(epochs: dict[str, np.ndarray]) -> str:
    """Returns the values of epochs as HTML."""
    count = _length(epochs)
    if not count:
        return ""
    rows = [
        [str(i + 1), *(_values.format_value(x[i]) for x in epochs.values())] for i in range(count)
    ]
    if count > _FIRST + _LAST:
        rows[_FIRST:-_LAST] = [["...", *("" for _ in epochs)]]
    body = "".join(_row("td", cells) for cells in rows)
    # A wide table scrolls by itself: a page would cut it off.
    return (
        '<div style="overflow-x:auto"><table style="white-space:nowrap">'
        f"{_row('th', ['epoch', *epochs])}{body}</table></div>"
    )


def _row(tag: str, cells: Iterable[str]) -> str:
    return f"<tr>{''.join(f'<{tag}>{html.escape(cell)}</{tag}>' for cell in cells)}</tr>"


def _curves(history: History) -> str:
    """Returns the curves as HTML, or nothing where matplotlib is not installed."""
    try:
        data = base64.b64encode(_plot.png(history.plot(), dpi=80)).decode()
    except ImportError:
        return ""
    style = "max-width:100%;height:auto"
    return f'<img alt="learning curves" style="{style}" src="data:image/png;base64,{data}">'
