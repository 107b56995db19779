"""``python -m functrain.checkpoint``: lists checkpoints, and verifies them."""

import argparse
import functools
import os
import sys
from collections.abc import Mapping, Sequence
from typing import Any

import jax
from rich.table import Table

from functrain.checkpoint._checkpoint import read_unless_replaced, verify
from functrain.checkpoint._directory import path_of, steps
from functrain.checkpoint._errors import CheckpointCorruptError, ObjectStoreError
from functrain.checkpoint._files import resolve_path
from functrain.checkpoint._manifest import read_manifest
from functrain.common._repr import format_bytes
from functrain.common._table import render

_MAX_VALUES = 4  # columns


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command, and returns its exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m functrain.checkpoint",
        description="Lists the checkpoints of a directory, and verifies them. The exit status is 1 "
        "if one is damaged, and 2 if there is none.",
    )
    parser.add_argument("directory", help="of a Checkpointer, of one step, or from functrain.save")
    parser.add_argument("--verify", action="store_true", help="compare all bytes with checksums")
    options = parser.parse_args(arguments)
    try:
        path = resolve_path(options.directory, "directory")
        checkpoints = [path_of(path, step) for step in steps(path)] or [path]
        manifests, damage = read_all(checkpoints, reads_arrays=options.verify)
    except (ImportError, OSError, ValueError, ObjectStoreError) as error:
        print(error, file=sys.stderr)
        return 2
    print(f"{path}: {len(manifests)} intact, {len(damage)} damaged")
    print(table(manifests))
    for name, message in damage.items():
        print(f"{name}  damaged\n{message}")
    return 1 if damage else 0


def read_all(
    checkpoints: list[str], *, reads_arrays: bool
) -> tuple[dict[str, dict[str, Any]], dict[str, str]]:
    """Returns the manifests of intact checkpoints, and the damage of the others, by name."""
    manifests, damage = dict[str, dict[str, Any]](), dict[str, str]()
    read = verify if reads_arrays else read_manifest
    for path in checkpoints:
        name = os.path.basename(path)
        try:
            manifests[name] = read_unless_replaced(path, functools.partial(read, path))
        except CheckpointCorruptError as error:
            damage[name] = str(error)
        except FileNotFoundError:
            if len(checkpoints) == 1:
                raise
            # A training has removed it since the listing.
    return manifests, damage


def table(manifests: Mapping[str, Mapping[str, Any]]) -> str:
    """Returns a table with a row for each checkpoint."""
    # Values of evaluations come first, because there may be no room for all.
    names = {name for manifest in manifests.values() for name in manifest["values"]}
    ordered_names = sorted(names, key=lambda name: (not name.startswith("val_"), name))
    shown_names = ordered_names[:_MAX_VALUES]
    columns = ["checkpoint", "epoch", "saved (UTC)", "size", *shown_names]
    result = Table(*columns, box=None)
    for name, manifest in manifests.items():
        values = [manifest["values"].get(name) for name in shown_names]
        result.add_row(
            name,
            _format_epoch(manifest),
            str(manifest.get("saved_at", "?"))[:16].replace("T", " "),
            format_bytes(manifest["bytes"]),
            *("" if value is None else f"{value:.4g}" for value in values),
        )
    hidden_names = ", ".join(ordered_names[_MAX_VALUES:])
    return render(result) + (f"\nNot shown: {hidden_names}" if hidden_names else "")


def _format_epoch(manifest: Mapping[str, Any]) -> str:
    """Returns the number of finished epochs, and within an epoch the batch."""
    position = manifest.get("position", {})
    if manifest.get("epoch_over"):
        return f"{position['epoch'] + 1}"
    batch = position.get("batch")
    return f"{position.get('epoch', '?')}" + (f", batch {batch:,}" if batch else "")


if __name__ == "__main__":
    jax.config.update("jax_platforms", "cpu")  # an accelerator may be in use by another program
    sys.exit(main())
