"""Learning curves."""

import io
from typing import TYPE_CHECKING, Any

import numpy as np

from functrain.common._library import import_optional

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from functrain.trainer._history import History

_BLUE, _ORANGE, _GREY = "#1f5fa8", "#d1602a", "#b8c4d6"


def draw(history: "History") -> "Figure":
    """Draws one panel for each quantity: per step thin, per epoch bold, validation dashed.

    Of a population the median is bold, half of the members lie in a band, each is a thin line.
    """
    import_optional(
        "matplotlib.figure",
        "plotting needs matplotlib: pip install matplotlib (history.steps and history.epochs hold "
        "the numbers as NumPy arrays)",
    )
    from matplotlib.figure import Figure

    class Curves(Figure):
        """A figure that a notebook shows, whether or not pyplot has been imported."""

        def _repr_png_(self) -> bytes:
            return png(self, dpi=100)

    known = {**history.steps, **history.epochs, **history.points}
    names = list(dict.fromkeys(name.removeprefix("val_") for name in known if name != "seconds"))
    columns = min(3, max(1, len(names)))  # more in a row are too small on a page
    rows = max(1, -(-len(names) // columns))
    figure = Curves(figsize=(5.2 * columns, 3.6 * rows), layout="constrained")
    panels = np.ravel(figure.subplots(rows, columns))
    for panel, name in zip(panels, names, strict=False):
        _curves(panel, history, name)
    for panel in panels[max(1, len(names)) :]:
        panel.remove()
    return figure


def png(figure: "Figure", dpi: int) -> bytes:
    """Returns a figure as a PNG file."""
    picture = io.BytesIO()
    figure.savefig(picture, format="png", dpi=dpi)
    return picture.getvalue()


def _curves(panel: Any, history: "History", name: str) -> None:
    last = _last_step(history)
    first = history.first_step if last else 0
    panel.set_title(name.replace("_", " "))
    panel.set_xlabel("step" if last else "epoch")
    panel.grid(alpha=0.25)
    per_step = history.steps.get(name)
    is_rate = name.split("/")[-1] == "learning_rate" and per_step is not None
    if per_step is not None:
        at = np.arange(first + 1, first + len(per_step) + 1)
        alone = per_step.ndim == 1
        color, lw = (_GREY, 0.7) if alone and not is_rate else (_BLUE, 1.5)
        _draw(panel, at, per_step, color, "each step" if alone else "", thin=0.4, lw=lw)
    if is_rate:
        return
    if per_step is not None and np.isfinite(per_step).any():
        low, high = np.nanmin(per_step), np.nanpercentile(per_step, 99)
        # The first steps would flatten all the others.
        panel.set_ylim(low - 0.05 * (high - low), high + 0.1 * (high - low) + 1e-12)
    for key, ls, marker, color, label in (
        (name, "-", "o", _BLUE, "training"),
        (f"val_{name}", "--", "s", _ORANGE, "validation"),
    ):
        values = history.epochs.get(key)
        # Those of members are there step by step already.
        if values is not None and (values.ndim == 1 or key != name or per_step is None):
            each = (last - first) / len(values) if last else 1
            ends = first + np.arange(1, len(values) + 1) * each
            _draw(panel, ends, values, color, label, ls=ls, marker=marker, ms=3.5, lw=1.5)
        if key in history.points:
            line: dict[str, Any] = {"ls": ":", "marker": marker, "ms": 2.5, "lw": 1}
            _draw(panel, *history.points[key], color, f"{label}, within epochs", **line)
    panel.legend(fontsize=8)


def _draw(
    panel: Any,
    at: np.ndarray,
    values: np.ndarray,
    color: str,
    label: str,
    thin: float = 0.6,
    **line: Any,
) -> None:
    """Draws a line; of a population a thin one a member, their median, and where half of them are.

    Of a step of which no member has a value nothing is drawn.
    """
    if values.ndim == 1:
        panel.plot(at, values, color=color, label=label, **line)
        return
    some = ~np.isnan(values).all(axis=1)
    at, values = at[some], values[some]
    panel.plot(at, values, color=color, lw=thin, alpha=min(0.5, 8 / values.shape[1]))
    low, middle, high = np.nanpercentile(values, [25, 50, 75], axis=1)
    panel.fill_between(at, low, high, color=color, alpha=0.25, lw=0)
    name = f"{label}, median of {values.shape[1]}" if label else f"median of {values.shape[1]}"
    panel.plot(at, middle, color=color, lw=1.8, label=name)


def _last_step(history: "History") -> int:
    """The last step there is anything of; 0 where all there is comes by epoch."""
    ends = [history.first_step + len(values) for values in history.steps.values()]
    return max(ends + [int(at[-1]) for at, _ in history.points.values()], default=0)
