"""Learning curves."""

import io
import math
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import ArrayLike

from functrain.common._library import import_optional

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from functrain.trainer._history import History

_BLUE, _ORANGE, _GREY = "#1f5fa8", "#d1602a", "#b8c4d6"


def draw(history: "History") -> "Figure":
    """Draws one panel for each quantity; see `History.plot`."""
    import_optional(
        "matplotlib.figure",
        "Plots need matplotlib: pip install matplotlib. The numbers are NumPy arrays in "
        "history.steps and history.epochs.",
    )
    from matplotlib.figure import Figure

    class Curves(Figure):
        """A figure that a notebook shows, even if pyplot has not been imported."""

        def _repr_png_(self) -> bytes:
            return png(self, dpi=100)

    all_values = {**history.steps, **history.epochs, **history.within_epochs}
    # The time of an epoch, unless the step has a log of that name.
    if "seconds" not in history.steps:
        all_values.pop("seconds", None)
    # A dict keeps the order. A value and its evaluation share a panel.
    names = list(dict.fromkeys(name.removeprefix("val_") for name in all_values))
    # More than three panels in a row are too small on a page.
    columns = min(3, max(1, len(names)))
    rows = max(1, math.ceil(len(names) / columns))
    figure = Curves(figsize=(5.2 * columns, 3.6 * rows), layout="constrained")
    panels = np.ravel(figure.subplots(rows, columns))
    for panel, name in zip(panels, names, strict=False):
        panel.sharex(panels[0])
        _curves(panel, history, name)
    # The last row may have more panels than there are quantities.
    for panel in panels[max(1, len(names)) :]:
        panel.remove()
    return figure


def png(figure: "Figure", dpi: int) -> bytes:
    """Returns a figure as a PNG file."""
    picture = io.BytesIO()
    figure.savefig(picture, format="png", dpi=dpi)
    return picture.getvalue()


def _curves(panel: Any, history: "History", name: str) -> None:
    """Draws the curves of one quantity."""
    last = _last_step(history)
    first = history.first_step if last else 0
    panel.set_title(name.replace("_", " "))
    panel.set_xlabel("step" if last else "epoch")
    panel.grid(alpha=0.25)
    per_step = history.steps.get(name)
    if per_step is not None:
        steps = np.arange(first + 1, first + len(per_step) + 1)
        _draw(panel, steps, per_step, _GREY, "each step", lw=0.7)
    for key, ls, marker, color, label in (
        (name, "-", "o", _BLUE, "training"),
        (f"val_{name}", "--", "s", _ORANGE, "validation"),
    ):
        values = history.epochs.get(key)
        if values is not None:
            ends = history.epoch_ends
            if ends is None or not last:
                epoch_length = (last - first) / len(values) if last else 1
                ends = first + np.arange(1, len(values) + 1) * epoch_length
            _draw(panel, ends, values, color, label, ls=ls, marker=marker, ms=3.5, lw=1.5)
        if key in history.within_epochs:
            line: dict[str, Any] = {"ls": ":", "marker": marker, "ms": 2.5, "lw": 1}
            _draw(panel, *history.within_epochs[key], color, f"{label}, within epochs", **line)
    panel.legend(fontsize=8)


def _draw(
    panel: Any, steps: np.ndarray, values: ArrayLike, color: str, label: str, **line: Any
) -> None:
    """Draws a line; for a population a thin line per member, and their median."""
    values = np.asarray(values)
    if values.ndim > 1:
        members = values.shape[1]
        # The more members, the more transparent their lines.
        panel.plot(steps, values, color=color, lw=0.5, alpha=min(0.5, 8 / members))
        # Members that have stopped report NaN.
        has_values = ~np.isnan(values).all(axis=1)
        steps, values = steps[has_values], np.nanmedian(values[has_values], axis=1)
        label = f"{label}, median of {members}"
    panel.plot(steps, values, color=color, label=label, **line)


def _last_step(history: "History") -> int:
    """Returns the last step with a log or a point; 0 if the history has values of epochs only."""
    last_steps = [int(steps[-1]) for steps, _ in history.within_epochs.values()]
    if history.steps:
        last_steps.append(history.first_step + max(map(len, history.steps.values())))
    return max(last_steps, default=0)
