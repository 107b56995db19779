"""The history of a fit: logs of steps, values of epochs, and learning curves."""

import base64
import dataclasses
import html
import os
from collections.abc import Iterable
from typing import TYPE_CHECKING, NoReturn

import numpy as np

from functrain.common import _log_values
from functrain.common._paths import path_text
from functrain.trainer import _plot

if TYPE_CHECKING:
    from matplotlib.figure import Figure


# No generated `==`: it would compare arrays, which have no single truth value.
@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class History:
    """The logs and values of a fit. Two histories are equal only if they are the same object.

    Attributes:
      steps: Scalar logs of every step, by name: arrays `f32[steps]`, in the logs' dtype, with NaN
        for steps that did not report one. For a population `[steps, N]` with one number per member;
        `epochs` and `within_epochs` have this axis, too. `steps` and `within_epochs` are empty with
        ``fit(history="epochs")``.
      epochs: Values of every epoch, by name: arrays `f64[epochs]` with NaN for missing values. They
        are the means of the logs over the examples of the steps that reported them (for those of
        `train_step` about the learning rate, the loss scale and skipped steps, the last value),
        metrics, evaluations with the prefix ``val_``, and, unless the step has a log of that name,
        ``seconds``, the time of the epoch.
      within_epochs: Values that hooks added within epochs, by name:
        ``(steps i64[n], values f64[n])``.
      first_steps_seconds: Time until the first program had finished, most of which is compilation,
        in the process that took the last steps.
      first_step: The number of training steps before those in `steps`, if the fit continued a
        training. The steps in `within_epochs` and `epoch_ends` include them.
      epoch_ends: The number of training steps at the end of every epoch, `i64[epochs]`; None in a
        history that no fit made.

    Examples:
      >>> history = History(steps={"loss": np.array([3.0, 1.0])}, epochs={"loss": np.array([2.0])})
      >>> history.steps["loss"][-1].item()
      1.0
    """

    steps: dict[str, np.ndarray]
    epochs: dict[str, np.ndarray]
    within_epochs: dict[str, tuple[np.ndarray, np.ndarray]] = dataclasses.field(
        default_factory=dict
    )
    first_steps_seconds: float = float("nan")
    first_step: int = 0
    epoch_ends: np.ndarray | None = None

    def __repr__(self) -> str:
        names_by_kind: dict[str, Iterable[str]] = {
            f"{_length(self.steps)} steps": self.steps,
            f"{_length(self.epochs)} epochs": self.epochs,
            "within epochs": self.within_epochs,
        }
        parts = [f"{kind}: {', '.join(names)}" for kind, names in names_by_kind.items() if names]
        return f"History({'; '.join(parts)})"

    @property
    def history(self) -> NoReturn:
        """Raises AttributeError: Keras's History has a dict of that name."""
        raise AttributeError(
            "A functrain History has no attribute `history`, which is Keras's name. Use "
            'history.epochs["loss"] for the values of each epoch, and history.steps["loss"] for '
            "those of each step."
        )

    def _repr_html_(self) -> str:
        summary = f"<p><code>{html.escape(repr(self))}</code></p>"
        return f"<div>{summary}{_table(self.epochs)}{_curves(self)}</div>"

    def plot(self, path: str | os.PathLike[str] | None = None) -> "Figure":
        """Draws the learning curves, one panel for each quantity; needs matplotlib.

        Thin lines are values of steps, bold lines those of epochs, dashed lines evaluations, dotted
        lines `within_epochs`. For a population, thin lines are members, and the others are the
        medians of those that have not stopped.

        Args:
          path: A file to save the picture to as well, such as ``curves.png``.

        Returns:
          A matplotlib Figure, which a notebook shows as a picture.

        Raises:
          ImportError: matplotlib is not installed.
        """
        figure = _plot.draw(self)
        if path is not None:
            figure.savefig(path_text(path), dpi=120)
        return figure


def _length(values: dict[str, np.ndarray]) -> int:
    """Returns the number of steps or epochs."""
    return max(map(len, values.values()), default=0)


# The table shows this many epochs at its start and its end, and leaves out those in between.
_FIRST, _LAST = 3, 12


def _table(epochs: dict[str, np.ndarray]) -> str:
    """Returns the values of epochs as an HTML table."""
    count = _length(epochs)
    if not count:
        return ""
    columns = [list(map(_log_values.format_value, values)) for values in epochs.values()]
    rows = [list(row) for row in zip(map(str, range(1, count + 1)), *columns, strict=True)]
    if count > _FIRST + _LAST:
        rows[_FIRST:-_LAST] = [["...", *[""] * len(epochs)]]
    body = "".join(_row("td", cells) for cells in rows)
    # A wide table scrolls in its own box: a page would cut it off.
    return (
        '<div style="overflow-x:auto"><table style="white-space:nowrap">'
        f"{_row('th', ['epoch', *epochs])}{body}</table></div>"
    )


def _row(tag: str, cells: Iterable[str]) -> str:
    texts = [f"<{tag}>{html.escape(cell)}</{tag}>" for cell in cells]
    return f"<tr>{''.join(texts)}</tr>"


def _curves(history: History) -> str:
    """Returns the curves as HTML, or "" if matplotlib is not installed."""
    try:
        data = base64.b64encode(_plot.png(history.plot(), dpi=80)).decode()
    except ImportError:
        return ""
    style = "max-width:100%;height:auto"
    return f'<img alt="learning curves" style="{style}" src="data:image/png;base64,{data}">'
