"""``python -m functrain.checkpoint``: lists checkpoints, and verifies them."""

import argparse
import os
import sys
from collections.abc import Mapping, Sequence
from typing import Any

import jax
from rich.table import Table

from functrain.checkpoint._checkpoint import verify
from functrain.checkpoint._directory import path_of, read_each, steps
from functrain.checkpoint._errors import ObjectStoreError
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
        checkpoints = [path_of(path, step) for step in steps(path)]
        read = verify if options.verify else read_manifest
        manifests, damage = read_each(checkpoints or [path], read, skip_missing=bool(checkpoints))
    except (ImportError, OSError, ValueError, ObjectStoreError) as error:
        print(error, file=sys.stderr)
        return 2
    print(f"{path}: {len(manifests)} intact, {len(damage)} damaged")
    print(table(manifests))
    for message in damage.values():
        print(f"damaged: {message}")
    return 1 if damage else 0


def table(manifests: Mapping[str, Mapping[str, Any]]) -> str:
    """Returns a table with a row for each checkpoint."""
    # Values of evaluations come first, because there may be no room for all.
    all_names = {name for manifest in manifests.values() for name in manifest["values"]}
    names = sorted(all_names, key=lambda name: (not name.startswith("val_"), name))[:_MAX_VALUES]
    columns = ["checkpoint", "epoch", "saved (UTC)", "size", *names]
    result = Table(*columns, box=None)
    for path, manifest in manifests.items():
        values = [manifest["values"].get(name) for name in names]
        result.add_row(
            os.path.basename(path),
            _format_epoch(manifest),
            str(manifest.get("saved_at", "?"))[:16].replace("T", " "),
            format_bytes(manifest["bytes"]),
            *("" if value is None else f"{value:.4g}" for value in values),
        )
    return render(result)


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
