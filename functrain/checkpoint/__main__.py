"""``python -m functrain.checkpoint``: lists checkpoints, verifies them, compares two."""

import argparse
import os
import sys
import warnings
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from rich.table import Table

from functrain.checkpoint import _storage
from functrain.checkpoint._checkpointer import Checkpointer, best_step
from functrain.checkpoint._errors import CheckpointCorruptError
from functrain.checkpoint._leaves import leaf_path, tree_name
from functrain.checkpoint._manifest import STATE, read_manifest
from functrain.common import _direction, _repr, _table

_WIDTH = 80
_EXAMPLES = """\
examples:
  python -m functrain.checkpoint run                     the checkpoints in a directory
  python -m functrain.checkpoint run/000000001200        what one says of itself
  python -m functrain.checkpoint run --verify            reads every byte
  python -m functrain.checkpoint run other               compares their last ones

Ends with 0; with 1 if something is damaged, or two differ; with 2 if there is nothing to look at.
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Does what the command line asks for, and returns the exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m functrain.checkpoint",
        description="Lists the checkpoints of a directory, verifies them, compares two.",
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("directory", help="of a Checkpointer, of one step, or from functrain.save")
    parser.add_argument("other", nargs="?", help="another, to compare with")
    parser.add_argument("--verify", action="store_true", help="compare all with its digests")
    options = parser.parse_args(arguments)
    if options.verify and options.other is not None:
        parser.error("--verify takes one directory")
    try:
        with warnings.catch_warnings():
            warnings.showwarning = lambda message, *_, **__: print(f"Note: {message}")
            path, places = _places(options.directory)
            if options.other is not None:
                return _compare(places[-1], _places(options.other)[1][-1])
            if options.verify:
                return _verify(places)
            print(listed(path, places) if places != [path] else described(path))
    except (OSError, ValueError, CheckpointCorruptError) as error:
        print(error, file=sys.stderr)
        return 1 if isinstance(error, CheckpointCorruptError) else 2
    return 0


def _places(directory: str) -> tuple[str, list[str]]:
    """Returns the path of a directory, and of its checkpoints: its own if it is one itself."""
    path = _storage.find_checkpoint(os.path.realpath(directory), "a directory of checkpoints")
    steps = Checkpointer(path).steps()
    return path, [_storage.find_checkpoint(os.path.join(path, f"{n:012d}")) for n in steps] or [
        path
    ]


def _verify(places: list[str]) -> int:
    damaged = 0
    for place in places:
        name = _repr.shorten_start(os.path.basename(place), 40)
        try:
            _storage.verify(place)
        except CheckpointCorruptError as error:
            damaged += 1
            print(f"{name}  damaged\n{error}")
        else:
            print(f"{name}  whole, {_repr.format_bytes(_storage.size_on_disk(place))}")
    if damaged:
        print(f"{damaged} of {len(places)} damaged.")
    return 1 if damaged else 0


def listed(path: str, places: list[str]) -> str:
    """Returns a table of the checkpoints in a directory."""
    manifests = [_manifest(place) for place in places]
    steps = [int(os.path.basename(place)[:12]) for place in places]
    columns = [
        ("step", [f"{step:,}" for step in steps]),
        ("epoch", [_epoch(manifest) for manifest in manifests]),
        ("saved (UTC)", [_saved_at(manifest) for manifest in manifests]),
        ("size", [_repr.format_bytes(_storage.size_on_disk(place)) for place in places]),
    ]
    values = [manifest.get("values", {}) for manifest in manifests]
    names = sorted(  # those of evaluations come first: there may be no room for all
        dict.fromkeys(name for known in values for name in known),
        key=lambda name: not name.startswith("val_"),
    )
    lines, hidden = list[str](), list[str]()
    for name in names:
        cells = _marked(name, [known.get(name) for known in values])
        if hidden or _width([*columns, (name, cells)]) > _WIDTH:
            hidden.append(name)
        else:
            columns.append((name, cells))
            lines += ["* the best value"] if any("*" in cell for cell in cells) else []
    lines = lines[:1]
    if hidden:
        lines.insert(0, f"Not shown: {_some(hidden)}.")
    damaged = [f"{n:,}" for n, manifest in zip(steps, manifests, strict=True) if not manifest]
    if damaged:
        lines.append(f"Damaged: {_some(damaged)}. What is wrong with them: --verify.")
    head = f"{_repr.shorten_start(path, _WIDTH - 18)}: {_count(len(places), 'checkpoint')}"
    return "\n".join([head, _columns(columns), *lines])


def described(directory: str) -> str:
    """Returns what one checkpoint says of itself."""
    manifest = read_manifest(directory)
    rows = {"size": _repr.format_bytes(_storage.size_on_disk(directory))}
    if "step" in manifest:
        step = f"{manifest['step']:,}, epoch {_epoch(manifest)}"
        rows = {"step": step, "saved": f"{_saved_at(manifest)} UTC", **rows}
    for name in manifest["trees"]:
        count = sum(tree_name(leaf) == name for leaf in manifest["leaves"])
        rows[name] = _count(count, "leaf", "leaves")
    rows |= {name: f"{x:.6g}" for name, x in manifest["values"].items()}
    for name in ("functrain", "jax", "python", "device", "devices", "cores"):
        rows[name] = str(manifest["run"].get(name, "?"))
    wide = max(map(len, rows))
    head = _repr.shorten_start(directory, _WIDTH - 18)
    return "\n".join([head, *(f"  {name:<{wide}}  {x}" for name, x in rows.items())])


def _manifest(directory: str) -> dict[str, Any]:
    """Returns the manifest of a checkpoint; nothing where it is damaged."""
    try:
        return read_manifest(directory)
    except CheckpointCorruptError:
        return {}


def _epoch(manifest: Mapping[str, Any]) -> str:
    """Returns how many epochs are over, and in the midst of one the batch."""
    position = manifest.get("position", {})
    if manifest.get("epoch_over"):
        return f"{position['epoch'] + 1}"
    batch = position.get("batch")
    return f"{position.get('epoch', '?')}" + (f", batch {batch:,}" if batch else "")


def _saved_at(manifest: Mapping[str, Any]) -> str:
    return str(manifest.get("saved_at", "?"))[:16].replace("T", " ")


def _marked(name: str, values: list[float | None]) -> list[str]:
    """Returns values as texts, the best of them with a star if its name tells which is."""
    known = {i: x for i, x in enumerate(values) if x is not None}
    try:
        best = best_step(known, _direction.sign(name, "auto"))
    except ValueError:
        best = None
    texts = ["" if x is None else f"{x:.4g}" for x in values]
    return [text + ("*" if i == best else " ") for i, text in enumerate(texts)]


def _columns(columns: Sequence[tuple[str, Sequence[str]]], left: Sequence[str] = ()) -> str:
    """Returns columns of texts side by side, with headings, flush right but for some."""
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for name, _ in columns:
        table.add_column(name, justify="left" if name in left else "right", no_wrap=True)
    for row in zip(*(cells for _, cells in columns), strict=True):
        table.add_row(*row)
    return "\n".join(f"  {line}" for line in _table.render(table).splitlines())


def _width(columns: Sequence[tuple[str, Sequence[str]]]) -> int:
    return sum(2 + max(map(len, [name, *cells])) for name, cells in columns)


def _count(number: int, one: str, more: str = "") -> str:
    return f"{number:,} {one if number == 1 else more or one + 's'}"


def _some(names: Sequence[str], most: int = 6) -> str:
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more


# Two checkpoints side by side.


class Difference(NamedTuple):
    """A leaf that is not the same in two checkpoints."""

    name: str  # its path; below the name of its tree, where that is not the state
    what: str  # what differs, in words
    most: float | None  # the largest difference of two elements, where there is one to tell


def _compare(first: str, second: str, most: int = 40) -> int:
    """Prints a report on two checkpoints; returns 1 if they differ."""
    found, count = differences(first, second)
    for name, path in (("first", first), ("second", second)):
        print(f"  {name:<7}{_repr.shorten_start(path, _WIDTH - 9)}")
    pair = read_manifest(first), read_manifest(second)
    one, two = ({"step": manifest.get("step"), **manifest["run"]} for manifest in pair)
    for name in {**one, **two}:
        if one.get(name) != two.get(name):
            print(f"  {name}: {one.get(name)} and {two.get(name)}")
    if not found:
        print(f"All of {count:,} leaves are the same, bit for bit.")
        return 0
    amounts = ["" if x.most is None else f"{x.most:.3g}" for x in found[:most]]
    whats = [_repr.shorten_start(x.what, 36) for x in found[:most]]
    room = _WIDTH - 6 - max(map(len, whats)) - max(len("most"), *map(len, amounts))
    names = [_repr.shorten_start(x.name, room) for x in found[:most]]
    columns = [("leaf", names), ("differs", whats), ("most", amounts)]
    print(_columns(columns, left=("leaf", "differs")))
    if len(found) > most:
        print(f"  ... and {len(found) - most:,} more")
    print(f"{len(found):,} of {count:,} leaves differ.")
    return 1


def differences(first: str, second: str) -> tuple[list[Difference], int]:
    """Returns the leaves that differ in two checkpoints, and how many there are in all.

    Those of the same digests are not read.
    """
    found, pair = [], (read_manifest(first), read_manifest(second))
    names = {**pair[0]["leaves"], **pair[1]["leaves"]}
    for name in names:
        one, two = (manifest["leaves"].get(name) for manifest in pair)
        what, most = "", None
        if one is None or two is None:
            what = f"{names[name]['spec']}, {'second' if one is None else 'first'} only"
        elif one["spec"] != two["spec"]:
            what = f"{one['spec']} and {two['spec']}"
        elif [shard[2:] for shard in one["shards"]] != [shard[2:] for shard in two["shards"]]:
            places = zip((first, second), pair, strict=True)
            what, most = _difference(one["spec"], *(_read(*place, name) for place in places))
        if what:
            found.append(
                Difference(leaf_path(name) if tree_name(name) == STATE else name, what, most)
            )
    return found, len(names)


def _read(directory: str, manifest: Mapping[str, Any], name: str) -> np.ndarray:
    array: np.ndarray = _storage.read_leaves(directory, manifest, {name: lambda read: read()})[name]
    return array


def _difference(spec: str, a: np.ndarray, b: np.ndarray) -> tuple[str, float | None]:
    """Returns in words in how many elements two arrays differ, and by how much at the most."""
    # Compared by bytes, NaNs are equal to themselves.
    bits = (np.ascontiguousarray(x).reshape(-1).view(f"V{x.dtype.itemsize}") for x in (a, b))
    is_other = next(bits) != next(bits)
    if not is_other.any():
        return "", None  # the same, stored in other parts
    if spec.startswith("key<"):
        return f"{spec}, other keys", None
    what = f"{np.count_nonzero(is_other):,} of {a.size:,} elements"
    if not jnp.issubdtype(a.dtype, jnp.number):
        return what, None
    wide = np.complex128 if jnp.issubdtype(a.dtype, jnp.complexfloating) else np.float64
    with np.errstate(invalid="ignore"):  # inf - inf
        gaps = np.abs(a.reshape(-1)[is_other].astype(wide) - b.reshape(-1)[is_other].astype(wide))
    return what, float(gaps.max())


if __name__ == "__main__":
    jax.config.update("jax_platforms", "cpu")  # an accelerator may be somebody's
    sys.exit(main())
