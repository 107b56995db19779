"""``python -m functrain.checkpoint``: lists, verifies, compares and watches checkpoints."""

import argparse
import contextlib
import itertools
import os
import sys
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import numpy as np

from functrain.checkpoint import _storage
from functrain.checkpoint._arrays import read_array
from functrain.checkpoint._errors import CheckpointCorruptError, ObjectStoreError
from functrain.checkpoint._leaves import leaf_path, tree_name
from functrain.checkpoint._manifest import STATE, read_manifest
from functrain.checkpoint._remote import files_at
from functrain.checkpoint._step_directory import best_step, find_checkpoints
from functrain.checkpoint._watch import call_for_each
from functrain.common import _direction, _repr
from functrain.common._paths import path_text

_WIDTH = 80  # columns
_MAX_DIFFERENCES = 40
_MAX_NAMES = 6
_EXAMPLES = """\
examples:
  python -m functrain.checkpoint run                     lists the checkpoints of a directory
  python -m functrain.checkpoint run/000000001200        describes one checkpoint
  python -m functrain.checkpoint run --verify            reads every byte
  python -m functrain.checkpoint run other               compares their last checkpoints
  python -m functrain.checkpoint run --watch evaluate:main --progress run.evaluated
                                                         calls a function with each new one

The exit status is 0; 1 if a checkpoint is damaged, or two differ; 2 if there is none.
"""

_T = TypeVar("_T")
Column = tuple[str, Sequence[str]]  # a heading, and a text for each row


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command, and returns its exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m functrain.checkpoint",
        description="Lists the checkpoints of a directory, verifies them, compares two, or calls a "
        "function with each new one.",
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("directory", help="of a Checkpointer, of one step, or from functrain.save")
    parser.add_argument("other", nargs="?", help="another directory, to compare with")
    parser.add_argument("--verify", action="store_true", help="compare all bytes with checksums")
    parser.add_argument(
        "--watch", metavar="MODULE:FUNCTION", help="call it with the path of each checkpoint"
    )
    help_text = "remember the last step there, for a restart of --watch"
    parser.add_argument("--progress", type=path_text, metavar="FILE", help=help_text)
    help_text = "seconds between two looks of --watch; 10 by default"
    parser.add_argument("--interval", type=float, default=10.0, metavar="SECONDS", help=help_text)
    help_text = "end --watch after this time without a new checkpoint"
    parser.add_argument("--timeout", type=float, metavar="SECONDS", help=help_text)
    options = parser.parse_args(arguments)
    if options.verify and options.other is not None:
        parser.error("--verify takes one directory")
    if options.watch is not None:
        times = {"interval": options.interval, "timeout": options.timeout}
        call_for_each(options.directory, options.watch, options.progress, **times)
        return 0
    try:
        # Warnings are part of the report, without the line of code that they come from.
        with warnings.catch_warnings():
            warnings.showwarning = lambda message, *_, **__: print(f"Note: {message}")
            expected = "a directory of checkpoints"
            path, checkpoints = find_checkpoints(options.directory, expected)
            if options.other is not None:
                return _compare(checkpoints[-1], find_checkpoints(options.other, expected)[1][-1])
            if options.verify:
                return _verify(checkpoints)
            is_single = checkpoints == [path]
            print(_read(path, describe) if is_single else list_checkpoints(path, checkpoints))
    except (ImportError, OSError, ValueError, CheckpointCorruptError, ObjectStoreError) as error:
        print(error, file=sys.stderr)
        return 1 if isinstance(error, CheckpointCorruptError) else 2
    return 0


def _read(target: str, read: Callable[[str], _T]) -> _T:
    """Calls a function with the path of a checkpoint, which a training may replace meanwhile."""
    return _storage.read_unless_replaced(target, lambda: read(files_at(target).find(target)))


def _verify(checkpoints: list[str]) -> int:
    """Prints the damage of each checkpoint; returns 1 if there is any."""
    damaged = 0
    for checkpoint in checkpoints:
        name = _repr.shorten_start(os.path.basename(checkpoint), 40)
        try:
            _read(checkpoint, _storage.verify)
            print(f"{name}  intact, {_read(checkpoint, _size)}")
        except CheckpointCorruptError as error:
            damaged += 1
            print(f"{name}  damaged\n{error}")
        except FileNotFoundError:
            print(f"{name}  removed since it was listed")
    if damaged:
        print(f"{damaged} of {len(checkpoints)} damaged.")
    return 1 if damaged else 0


def list_checkpoints(path: str, checkpoints: list[str]) -> str:
    """Returns a table of the checkpoints in a directory."""
    steps, manifests, sizes = list[int](), list[dict[str, Any]](), list[str]()
    for checkpoint in checkpoints:
        # A training may have removed it since the listing.
        with contextlib.suppress(FileNotFoundError):
            # A damaged checkpoint has a row as well, with its step and its size.
            manifest = _read_manifest_if_intact(checkpoint)
            sizes.append(_read(checkpoint, _size))
            manifests.append(manifest)
            steps.append(int(os.path.basename(checkpoint)))
    columns: list[Column] = [
        ("step", list(map("{:,}".format, steps))),
        ("epoch", list(map(_format_epoch, manifests))),
        ("saved (UTC)", list(map(_format_time, manifests))),
        ("size", sizes),
    ]
    values = [manifest.get("values", {}) for manifest in manifests]
    # Values of evaluations come first, because there may be no room for all.
    unique_names = dict.fromkeys(itertools.chain.from_iterable(values))
    hidden_names: list[str] = []
    for name in sorted(unique_names, key=lambda name: not name.startswith("val_")):
        column = name, _mark_best(name, [x.get(name) for x in values])
        if hidden_names or _table_width([*columns, column]) > _WIDTH:
            hidden_names.append(name)
        else:
            columns.append(column)
    lines = [_render(columns)]
    if hidden_names:
        lines.append(f"Not shown: {_join_names(hidden_names)}.")
    if "*" in lines[0]:
        lines.append("* the best value")
    damaged = [f"{n:,}" for n, manifest in zip(steps, manifests, strict=True) if not manifest]
    if damaged:
        lines.append(f"Damaged: {_join_names(damaged)}. --verify tells what is wrong with them.")
    head = f"{_repr.shorten_start(path, _WIDTH - 18)}: {_count(len(steps), 'checkpoint')}"
    return "\n".join([head, *lines])


def describe(directory: str) -> str:
    """Returns a description of one checkpoint, from its manifest."""
    manifest = read_manifest(directory)
    rows = {"size": _size(directory)}
    if "step" in manifest:
        step = f"{manifest['step']:,}, epoch {_format_epoch(manifest)}"
        rows = {"step": step, "saved": f"{_format_time(manifest)} UTC", **rows}
    trees = list(map(tree_name, manifest["leaves"]))
    for name in manifest["trees"]:
        rows[name] = _count(trees.count(name), "leaf", "leaves")
    for name, value in manifest["values"].items():
        rows[name] = f"{value:.6g}"
    for name in ("functrain", "jax", "python", "device", "devices", "cores"):
        rows[name] = str(manifest["run"].get(name, "?"))
    width = max(map(len, rows))
    lines = [f"  {name:<{width}}  {text}" for name, text in rows.items()]
    return "\n".join([_repr.shorten_start(directory, _WIDTH - 18), *lines])


def _read_manifest_if_intact(directory: str) -> dict[str, Any]:
    """Returns the manifest of a checkpoint, {} if it is damaged."""
    try:
        return _read(directory, read_manifest)
    except CheckpointCorruptError:
        return {}


def _size(directory: str) -> str:
    return _repr.format_bytes(files_at(directory).size(directory))


def _format_epoch(manifest: Mapping[str, Any]) -> str:
    """Returns the number of finished epochs, and within an epoch the batch."""
    position = manifest.get("position", {})
    if manifest.get("epoch_over"):
        return f"{position['epoch'] + 1}"
    batch = position.get("batch")
    return f"{position.get('epoch', '?')}" + (f", batch {batch:,}" if batch else "")


def _format_time(manifest: Mapping[str, Any]) -> str:
    return str(manifest.get("saved_at", "?"))[:16].replace("T", " ")


def _mark_best(name: str, values: list[float | None]) -> list[str]:
    """Formats values, the best one with a star if the name tells which is best."""
    by_row = {i: x for i, x in enumerate(values) if x is not None}
    try:
        best_row = best_step(by_row, _direction.sign(name, "auto"))
    except ValueError:  # the name does not tell whether more is better
        best_row = None
    texts = []
    for row, value in enumerate(values):
        text = "" if value is None else f"{value:.4g}"
        texts.append(f"{text}*" if row == best_row else text)
    return texts


def _render(columns: Sequence[Column], left_aligned: Sequence[str] = ()) -> str:
    """Renders columns side by side with headings, aligned right except for some."""
    aligned = []
    for name, cells in columns:
        align = str.ljust if name in left_aligned else str.rjust
        width = _table_width([(name, cells)]) - 2
        aligned.append([align(text, width) for text in (name, *cells)])
    return "\n".join(f"  {'  '.join(row)}".rstrip() for row in zip(*aligned, strict=True))


def _table_width(columns: Sequence[Column]) -> int:
    return sum(2 + max(map(len, [name, *cells])) for name, cells in columns)


def _count(number: int, singular: str, plural: str = "") -> str:
    return f"{number:,} {singular if number == 1 else plural or singular + 's'}"


def _join_names(names: Sequence[str]) -> str:
    more = f" and {len(names) - _MAX_NAMES} more" if len(names) > _MAX_NAMES else ""
    return ", ".join(names[:_MAX_NAMES]) + more


# Comparison of two checkpoints.


class Difference(NamedTuple):
    """A leaf that differs in two checkpoints.

    Attributes:
      name: Its path; for trees other than the state, with the name of the tree.
      description: What differs.
      largest: The largest difference of two elements, None for keys, flags and other shapes.
    """

    name: str
    description: str
    largest: float | None


def _compare(first: str, second: str) -> int:
    """Prints a report on two checkpoints; returns 1 if they differ."""

    def read(first: str, second: str) -> Any:
        return differences(first, second), list(map(read_manifest, (first, second)))

    found, manifests = _read(first, lambda a: _read(second, lambda b: read(a, b)))
    found_differences, leaf_count = found
    runs = []
    for label, path, manifest in zip(("first", "second"), (first, second), manifests, strict=True):
        print(f"  {label:<7}{_repr.shorten_start(path, _WIDTH - 9)}")
        runs.append({"step": manifest.get("step"), **manifest["run"]})
    for name in {**runs[0], **runs[1]}:
        if runs[0].get(name) != runs[1].get(name):
            print(f"  {name}: {runs[0].get(name)} and {runs[1].get(name)}")
    if not found_differences:
        print(f"All {leaf_count:,} leaves are the same, bit for bit.")
        return 0
    listed_differences = found_differences[:_MAX_DIFFERENCES]
    amounts = ["" if x.largest is None else f"{x.largest:.3g}" for x in listed_differences]
    descriptions = [_repr.shorten_start(x.description, 36) for x in listed_differences]
    # The names get the rest of the width.
    other_columns = [("differs", descriptions), ("most", amounts)]
    width = _WIDTH - 2 - _table_width(other_columns)
    names = [_repr.shorten_start(x.name, width) for x in listed_differences]
    print(_render([("leaf", names), *other_columns], left_aligned=("leaf", "differs")))
    if len(found_differences) > len(listed_differences):
        print(f"  ... and {len(found_differences) - len(listed_differences):,} more")
    print(f"{len(found_differences):,} of {leaf_count:,} leaves differ.")
    return 1


def differences(first: str, second: str) -> tuple[list[Difference], int]:
    """Returns the leaves that differ in two checkpoints, and the number of all leaves.

    Leaves with the same checksums are not read.
    """
    result, manifests = [], (read_manifest(first), read_manifest(second))
    names = {**manifests[0]["leaves"], **manifests[1]["leaves"]}
    for name in names:
        a, b = manifests[0]["leaves"].get(name), manifests[1]["leaves"].get(name)
        description, largest = "", None
        if a is None or b is None:
            description = f"{names[name]['spec']}, {'second' if a is None else 'first'} only"
        elif a["spec"] != b["spec"]:
            description = f"{a['spec']} and {b['spec']}"
        elif _checksums(a) != _checksums(b):
            array = read_array(first, manifests[0], name)
            other = read_array(second, manifests[1], name)
            description, largest = _describe_difference(a["spec"], array, other)
        if description:
            shown_name = leaf_path(name) if tree_name(name) == STATE else name
            result.append(Difference(shown_name, description, largest))
    return result, len(names)


def _checksums(record: Mapping[str, Any]) -> list[Any]:
    """Returns box and checksum of each part of a leaf."""
    return [shard[2:] for shard in record["shards"]]


def _describe_difference(spec: str, a: np.ndarray, b: np.ndarray) -> tuple[str, float | None]:
    """Returns how many elements of two arrays differ, and their largest difference."""
    is_different = _bits(a) != _bits(b)
    if not is_different.any():
        return "", None  # the same bits, stored in other parts
    if spec.startswith("key<"):
        return f"{spec}, other keys", None
    description = f"{np.count_nonzero(is_different):,} of {a.size:,} elements"
    if not jnp.issubdtype(a.dtype, jnp.number):
        return description, None
    is_complex = jnp.issubdtype(a.dtype, jnp.complexfloating)
    # Half precision would round the difference, and unsigned integers would wrap around.
    wide_dtype = np.complex128 if is_complex else np.float64
    wide_a = a.reshape(-1)[is_different].astype(wide_dtype)
    wide_b = b.reshape(-1)[is_different].astype(wide_dtype)
    with np.errstate(invalid="ignore"):  # inf - inf
        return description, float(np.abs(wide_a - wide_b).max())


def _bits(array: np.ndarray) -> np.ndarray:
    """Returns the elements as bytes: so NaN equals itself, and 0.0 differs from -0.0."""
    return np.ascontiguousarray(array).reshape(-1).view(f"V{array.dtype.itemsize}")


if __name__ == "__main__":
    # An accelerator may be in use by another program.
    if not any(argument.startswith("--watch") for argument in sys.argv):  # it may need it
        jax.config.update("jax_platforms", "cpu")
    sys.exit(main())
