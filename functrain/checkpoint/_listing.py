"""What checkpoints there are, as tables that fit a terminal."""

from collections.abc import Mapping, Sequence
from typing import Any

from rich.table import Table

from functrain.checkpoint._about import read_about
from functrain.checkpoint._directory import Directory, best_of
from functrain.checkpoint._errors import CheckpointCorruptError
from functrain.checkpoint._leaves import root_of
from functrain.checkpoint._store import bytes_of
from functrain.common import _direction, _repr, _table

WIDTH = 80


def listed(directory: Directory) -> str:
    """Returns a table of the checkpoints in a directory."""
    abouts = {step: _about(directory.at(step)) for step in directory.steps()}
    values = {step: about.get("values", {}) for step, about in abouts.items()}
    fixed: list[tuple[str, list[str]]] = [
        ("step", [f"{step:,}" for step in abouts]),
        ("epoch", [_epoch(about) for about in abouts.values()]),
        ("saved (UTC)", [_when(about) for about in abouts.values()]),
        ("size", [_repr.size(bytes_of(directory.at(step))) for step in abouts]),
    ]
    found = dict.fromkeys(name for known in values.values() for name in known)
    names = sorted(found, key=lambda name: not name.startswith("val_"))  # there may be no room
    columns = [(name, _marked(name, list(abouts), values)) for name in names]
    shown = len(columns)
    while _width(fixed + columns[:shown]) > WIDTH and shown:
        shown -= 1
    lines = [f"{_short(directory.path)}: {_count(len(abouts), 'checkpoint')}"]
    lines += [table(fixed + columns[:shown])]
    if shown < len(columns):
        lines += [f"Not shown: {_some(names[shown:])}."]
    if any("*" in cell for _, cells in columns[:shown] for cell in cells):
        lines += ["* the best value"]
    damaged = [f"{step:,}" for step, about in abouts.items() if not about]
    if damaged:
        lines += [f"Damaged: {_some(damaged)}. What is wrong with them: --verify."]
    return "\n".join(lines)


def described(directory: str) -> str:
    """Returns what one checkpoint says of itself."""
    about = read_about(directory)
    rows = [("step", f"{about['step']:,}, epoch {_epoch(about)}")] if "step" in about else []
    rows += [("saved", f"{_when(about)} UTC")] if "saved_at" in about else []
    rows += [("size", _repr.size(bytes_of(directory)))]
    for name in about["trees"]:
        count = sum(root_of(leaf) == name for leaf in about["leaves"])
        rows += [(name, _count(count, "leaf", "leaves"))]
    rows += [(name, f"{x:.6g}") for name, x in about["values"].items()]
    shown = ("functrain", "jax", "python", "device", "devices", "cores")
    rows += [(name, str(about["run"][name])) for name in shown if name in about["run"]]
    wide = max(len(name) for name, _ in rows)
    return "\n".join([_short(directory), *(f"  {name:<{wide}}  {x}" for name, x in rows)])


def table(columns: Sequence[tuple[str, Sequence[str]]], *, left: Sequence[str] = ()) -> str:
    """Returns columns of texts side by side, with headings, flush right but for some."""
    made = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for name, _ in columns:
        made.add_column(name, justify="left" if name in left else "right", no_wrap=True)
    for row in zip(*(cells for _, cells in columns), strict=True):
        made.add_row(*row)
    return "\n".join(f"  {line}" for line in _table.text(made).splitlines())


def _about(directory: str) -> dict[str, Any]:
    """Returns what a checkpoint says of itself; nothing where it is damaged."""
    try:
        return read_about(directory)
    except CheckpointCorruptError:
        return {}


def _epoch(about: Mapping[str, Any]) -> str:
    """Returns how many epochs are over, and in the midst of one the batch."""
    position = about.get("position", {})
    if "epoch" not in position:
        return "?"
    if about.get("epoch_over"):
        return f"{position['epoch'] + 1}"
    batch = position.get("batch")
    return f"{position['epoch']}" + (f", batch {batch:,}" if batch else "")


def _when(about: Mapping[str, Any]) -> str:
    return str(about.get("saved_at", "?"))[:16].replace("T", " ")


def _marked(name: str, steps: list[int], values: Mapping[int, Mapping[str, float]]) -> list[str]:
    """Returns the values of a name, the best of them with a star if its name tells which is."""
    there = {step: found[name] for step, found in values.items() if name in found}
    try:
        best = best_of(there, _direction.sign(name, "auto"))
    except ValueError:
        best = None
    texts = {step: f"{x:.4g}" for step, x in there.items()}
    return [texts.get(n, "") + ("*" if n == best and n in texts else " ") for n in steps]


def _width(columns: Sequence[tuple[str, Sequence[str]]]) -> int:
    return sum(2 + max(map(len, [name, *cells])) for name, cells in columns)


def _count(number: int, one: str, more: str = "") -> str:
    return f"{number:,} {one if number == 1 else more or one + 's'}"


def _some(names: Sequence[str], most: int = 6) -> str:
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more


def _short(path: str) -> str:
    return _repr.ending(path, WIDTH - 18)
