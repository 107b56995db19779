"""``python -m functrain.checkpoint``: lists checkpoints, verifies them, compares two."""

import argparse
import os
import sys
import warnings
from collections.abc import Sequence

import jax

from functrain.checkpoint._compare import compared
from functrain.checkpoint._directory import Directory
from functrain.checkpoint._errors import CheckpointCorruptError
from functrain.checkpoint._listing import described, listed
from functrain.checkpoint._place import find
from functrain.checkpoint._store import bytes_of, verify
from functrain.common import _repr

_ABOUT = """\
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
        epilog=_ABOUT,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("directory", help="of a Checkpointer, of one step, or from functrain.save")
    parser.add_argument("other", nargs="?", help="another, to compare with")
    parser.add_argument("--verify", action="store_true", help="compare all with its digests")
    asked = parser.parse_args(arguments)
    if asked.verify and asked.other is not None:
        parser.error("--verify takes one directory")
    try:
        with warnings.catch_warnings():
            warnings.showwarning = lambda message, *_, **__: print(f"Note: {message}")
            directory = _found(asked.directory)
            if asked.other is not None:
                last, other = (_places(d)[-1] for d in (directory, _found(asked.other)))
                text, same = compared(last, other)
                print(text)
                return 0 if same else 1
            if asked.verify:
                return _verified(_places(directory))
            print(listed(directory) if directory.steps() else described(directory.path))
    except (OSError, ValueError, CheckpointCorruptError) as error:
        print(error, file=sys.stderr)
        return 1 if isinstance(error, CheckpointCorruptError) else 2
    return 0


def _found(path: str) -> Directory:
    return Directory(find(os.path.realpath(path), "a directory of checkpoints"))


def _places(directory: Directory) -> list[str]:
    """Returns where the checkpoints in a directory are: there, if it is one itself."""
    places = [find(directory.place(step)) for step in directory.steps()]
    return places or [directory.path]


def _verified(places: list[str]) -> int:
    damaged = 0
    for each in places:
        name = _repr.ending(os.path.basename(each), 40)
        try:
            verify(each)
        except CheckpointCorruptError as error:
            damaged += 1
            print(f"{name}  damaged\n{error}")
        else:
            print(f"{name}  whole, {_repr.size(bytes_of(each))}")
    if damaged:
        print(f"{damaged} of {len(places)} damaged.")
    return 1 if damaged else 0


if __name__ == "__main__":
    jax.config.update("jax_platforms", "cpu")  # an accelerator may be somebody's
    sys.exit(main())
