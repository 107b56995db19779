"""A history as a notebook shows it: a table of its epochs, and the curves."""

import base64
import html
import io
from typing import TYPE_CHECKING

from functrain.common import _values

if TYPE_CHECKING:
    from functrain.trainer._history import History

_FIRST, _LAST = 3, 12  # of more epochs than both, those in between are left out


def page(history: "History") -> str:
    """Returns a history as HTML; without curves where matplotlib is not installed."""
    return f"<div>{_table(history)}{_curves(history)}</div>"


def _table(history: "History") -> str:
    said = f"<p><code>{html.escape(repr(history))}</code></p>"
    count = max(map(len, history.epochs.values()), default=0)
    if not count:
        return said
    head = "".join(f"<th>{html.escape(name)}</th>" for name in ("epoch", *history.epochs))
    shown = list(range(count))
    if count > _FIRST + _LAST:
        shown = shown[:_FIRST] + shown[-_LAST:]
    rows = [
        f"<tr><td>{i + 1}</td>"
        + "".join(f"<td>{_values.shown(values[i])}</td>" for values in history.epochs.values())
        + "</tr>"
        for i in shown
    ]
    if len(shown) < count:
        rows.insert(_FIRST, f"<tr><td>...</td>{'<td></td>' * len(history.epochs)}</tr>")
    # A wide table scrolls by itself: a page would cut it off.
    return (
        f'{said}<div style="overflow-x:auto"><table style="white-space:nowrap">'
        f"<tr>{head}</tr>{''.join(rows)}</table></div>"
    )


def _curves(history: "History") -> str:
    try:
        figure = history.plot()
    except ImportError:
        return ""
    picture = io.BytesIO()
    figure.savefig(picture, format="png", dpi=80)
    data = base64.b64encode(picture.getvalue()).decode()
    style = "max-width:100%;height:auto"
    return f'<img alt="learning curves" style="{style}" src="data:image/png;base64,{data}">'
