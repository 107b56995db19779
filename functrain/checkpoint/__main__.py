"""``python -m functrain.checkpoint``: lists checkpoints, and verifies them."""

import argparse
import os
import sys
from collections.abc import Sequence

import jax

from functrain.checkpoint._checkpoint import require_files, verify
from functrain.checkpoint._directory import path_of, read_each, steps
from functrain.checkpoint._errors import ObjectStoreError
from functrain.checkpoint._files import resolve_path
from functrain.common._repr import format_bytes


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command, and returns its exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m functrain.checkpoint",
        description="Lists the checkpoints of a directory. Only --verify reads the arrays; without "
        "it, files that are missing or cut short are found. The exit status is 1 if one is "
        "damaged, and 2 if there is none.",
    )
    parser.add_argument("directory", help="of a Checkpointer, of one step, or from functrain.save")
    parser.add_argument("--verify", action="store_true", help="compare all bytes with checksums")
    options = parser.parse_args(arguments)
    try:
        path = resolve_path(options.directory, "directory")
        checkpoints = [path_of(path, step) for step in steps(path)]
        read = verify if options.verify else require_files
        manifests, damage = read_each(checkpoints or [path], read, skip_missing=bool(checkpoints))
    except (ImportError, OSError, ValueError, ObjectStoreError) as error:
        print(error, file=sys.stderr)
        return 2
    kind = "intact" if options.verify else "not verified"
    print(f"{path}: {len(manifests)} {kind}, {len(damage)} damaged")
    for checkpoint, manifest in manifests.items():
        size = format_bytes(manifest["bytes"])
        entries = [manifest.get("saved_at"), manifest.get("position"), size, manifest["values"]]
        print(os.path.basename(checkpoint), *filter(None, entries), sep="  ")
    for message in damage.values():
        print(f"damaged: {message}")
    return 1 if damage else 0


if __name__ == "__main__":
    jax.config.update("jax_platforms", "cpu")  # an accelerator may be in use by another program
    sys.exit(main())
