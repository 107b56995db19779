"""Where a checkpoint stands, and how a new one takes the place of an old one.

A directory cannot be exchanged for another in one operation everywhere. So the old one is kept
beside its place until the new one stands there, and found there if the exchange was interrupted.
"""

import os
import shutil
import warnings

_NEW, _OLD, _GONE = ".functrain-new", ".functrain-old", ".functrain-gone"


def staged(target: str) -> str:
    """Returns where what will replace `target` is written first."""
    return target + _NEW


def exchange(target: str) -> None:
    """Puts what is staged into the place of `target`; one of the two is whole at any moment."""
    _remove(target + _OLD)
    os.rename(target, target + _OLD)
    os.rename(target + _NEW, target)
    _remove(target + _OLD)


def take_back(target: str) -> None:
    """Undoes an exchange that was interrupted between its two renames."""
    if saved_specs(target + _OLD) is not None and not os.path.lexists(target):
        os.rename(target + _OLD, target)


def find(target: str) -> str | None:
    """Returns where the checkpoint of a place is: there, or kept beside it; None if nowhere."""
    if os.path.lexists(target):
        return target
    kept = target + _OLD
    if saved_specs(kept) is None:
        return None
    warnings.warn(
        f"{target}: expected a checkpoint, got nothing: a save was interrupted while it replaced "
        f"the one there. The one before it was kept, and is loaded: {kept}. The next "
        "functrain.save(..., overwrite=True) puts things in order.",
        stacklevel=3,
    )
    return kept


def _remove(path: str) -> None:
    """Removes a directory; what a kill in the midst of it leaves is not under its name."""
    shutil.rmtree(path + _GONE, ignore_errors=True)
    if os.path.lexists(path):
        os.rename(path, path + _GONE)
        shutil.rmtree(path + _GONE)


def saved_specs(directory: str) -> dict[str, str] | None:
    """The specs in the file, or None if `save` did not write it."""
    from orbax.checkpoint import v1 as ocp

    try:
        metadata = ocp.metadata(directory).custom_metadata
    except (ocp.errors.InvalidLayoutError, OSError):
        return None
    specs: dict[str, str] | None = (metadata or {}).get("functrain", {}).get("leaves")
    return specs


def what(path: str) -> str:
    """Names what stands at a path, for error messages."""
    if not os.path.isdir(path):
        return "a file"
    return "something else" if saved_specs(path) is None else "a checkpoint"
