"""How a checkpoint comes to stand in its place, and takes that of an old one.

What is being written stands beside its place under another name, and is renamed when it is whole.
A directory cannot be exchanged for another in one operation everywhere: the old one is kept beside
its place until the new one stands there, and found there if the exchange was interrupted.
"""

import contextlib
import os
import shutil
import warnings
from collections.abc import Mapping
from typing import Any

from functrain.checkpoint._about import ABOUT, is_step
from functrain.checkpoint._leaves import Leaf
from functrain.checkpoint._store import sync_directory, write

_NEW, _OLD, _GONE = ".functrain-new", ".functrain-old", ".functrain-gone"


def local(path: str | os.PathLike[str], name: str = "path") -> str:
    """Returns a path that stays, wherever the process goes and whatever links change.

    Args:
      path: As a user gave it.
      name: Of the argument, for errors.

    Raises:
      TypeError: It is not a path.
      ValueError: It is empty, or an address.
    """
    if not isinstance(path, str | os.PathLike):
        raise TypeError(f"{name}: expected a path, such as 'runs/first', got {path!r}.")
    if not os.fspath(path):
        raise ValueError(
            f"{name}: expected a path, such as 'runs/first', got ''. The current directory is '.'."
        )
    if "://" in os.fspath(path):
        raise ValueError(
            f"{path}: expected a path of this machine, got an address. Save into a directory that "
            "is mounted, or copy what was saved."
        )
    return os.path.realpath(path)


def make_directory(path: str, name: str) -> None:
    """Makes a directory and its parents.

    Raises:
      OSError: It cannot be made; the message names the argument.
    """
    try:
        os.makedirs(path, exist_ok=True)
    except OSError as error:
        raise type(error)(
            f"{name}: expected a directory that can be made, got {path}: {error.strerror}. Choose "
            "one that this process may write to."
        ) from error


def identity(target: str) -> dict[str, tuple[int, int, int]]:
    """Returns what changes when what stands at a place is removed, or replaced by another."""
    found = {}
    for path in (target, target + _OLD):
        with contextlib.suppress(OSError):
            about = os.stat(path)
            found[path] = about.st_dev, about.st_ino, about.st_mtime_ns  # numbers come again
    return found


def staging(target: str) -> str:
    """Returns where what will stand at `target` is written first."""
    return target + _NEW


def staged(target: str) -> str:
    """Returns the same, where nothing is now."""
    remove(staging(target))
    return staging(target)


def write_whole(target: str, leaves: Mapping[str, Leaf], about: Mapping[str, Any]) -> None:
    """Writes a checkpoint, which stands in its place when it is whole."""
    write(staged(target), leaves, about)
    put(target)


def put(target: str) -> None:
    """Puts what is staged into its place; one of old and new is whole at any moment."""
    if os.path.lexists(target):
        remove(target + _OLD)
        os.rename(target, target + _OLD)
    os.rename(staging(target), target)
    sync_directory(os.path.dirname(target))
    remove(target + _OLD)


def take_back(target: str) -> None:
    """Undoes an exchange that was interrupted between its two renames."""
    if is_checkpoint(target + _OLD) and not os.path.lexists(target):
        os.rename(target + _OLD, target)


def find(target: str, wanted: str = "a checkpoint") -> str:
    """Returns where the checkpoint of a place is: there, or kept beside it.

    Raises:
      FileNotFoundError: It is nowhere.
    """
    if os.path.lexists(target):
        return target
    kept = target + _OLD
    if not is_checkpoint(kept):
        raise FileNotFoundError(f"{target}: expected {wanted}, got nothing. Check the path.")
    warnings.warn(
        f"{target}: expected a checkpoint, got nothing: a save was interrupted while it replaced "
        f"the one there. The one before it was kept, and is loaded: {kept}. The next "
        "save puts things in order.",
        stacklevel=3,
    )
    return kept


def tidy(directory: str) -> None:
    """Removes what interrupted saves of steps left, and takes back what they took away."""
    for name in sorted(os.listdir(directory)):
        path = os.path.join(directory, name)
        if not is_step(name.partition(".")[0]):
            continue
        if name.endswith(_OLD):
            take_back(path.removesuffix(_OLD))
            remove(path)
        elif name.endswith((_NEW, _GONE)):
            shutil.rmtree(path, ignore_errors=True)


def remove(path: str) -> None:
    """Removes a directory; what a kill in the midst of it leaves is not under its name."""
    shutil.rmtree(path + _GONE, ignore_errors=True)
    if os.path.lexists(path):
        os.rename(path, path + _GONE)
        shutil.rmtree(path + _GONE)


def is_checkpoint(directory: str) -> bool:
    """Whether a directory says that it is a checkpoint, damaged or not."""
    return not os.path.islink(directory) and os.path.isfile(os.path.join(directory, ABOUT))
