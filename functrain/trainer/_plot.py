"""Learning curves."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Series = Mapping[str, np.ndarray]


def draw(steps: Series, epochs: Series) -> "Figure":
    """Draws one panel for each quantity: per step thin, per epoch bold, validation dashed."""
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError(
            "plotting needs matplotlib: pip install matplotlib (history.steps and history.epochs "
            "hold the numbers as NumPy arrays)"
        ) from error
    names = [n for n in {**steps, **epochs} if _has_panel(n)]
    figure = Figure(figsize=(5.2 * max(1, len(names)), 3.6), layout="constrained")
    for panel, name in zip(
        np.atleast_1d(figure.subplots(1, max(1, len(names)))), names, strict=False
    ):
        _curves(panel, steps, epochs, name)
    return figure


def _has_panel(name: str) -> bool:
    return name != "seconds" and not name.startswith("val_")


def _curves(panel: Any, steps: Series, epochs: Series, name: str) -> None:
    total = max((len(v) for v in steps.values()), default=0)
    panel.set_title(name.replace("_", " "))
    panel.set_xlabel("step" if total else "epoch")
    panel.grid(alpha=0.25)
    per_step = steps.get(name)
    if name.split("/")[-1] == "learning_rate" and per_step is not None:
        panel.plot(np.arange(1, total + 1), per_step, color=_COLOR["training, epoch"], lw=1.5)
        return
    if per_step is not None:
        panel.plot(np.arange(1, total + 1), per_step, color="#b8c4d6", lw=0.7, label="each step")
        if np.isfinite(per_step).any():  # the first steps would flatten all the others
            low, high = np.nanmin(per_step), np.nanpercentile(per_step, 99)
            panel.set_ylim(low - 0.05 * (high - low), high + 0.1 * (high - low) + 1e-12)
    for key, style, label in (
        (name, "-o", "training, epoch"),
        (f"val_{name}", "--s", "validation"),
    ):
        values = epochs.get(key)
        if values is not None:
            at = np.arange(1, len(values) + 1) * (total / len(values) if total else 1)
            panel.plot(at, values, style, color=_COLOR[label], ms=3.5, lw=1.5, label=label)
    panel.legend(fontsize=8)


_COLOR = {"training, epoch": "#1f5fa8", "validation": "#d1602a"}
