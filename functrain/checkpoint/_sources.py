"""What is at a path: a checkpoint of functrain, or weights that another program wrote."""

import contextlib
import re
from collections.abc import Callable, Mapping
from typing import Any

from functrain.checkpoint._array_files import (
    ArrayFile,
    open_checkpoint,
    open_hdf5,
    open_keras,
    open_npz,
)
from functrain.checkpoint._errors import CheckpointCorruptError, CheckpointMismatchError
from functrain.checkpoint._files import files_at
from functrain.checkpoint._orbax import METADATA, find_items, open_orbax
from functrain.checkpoint._safetensors import INDEX, open_safetensors, open_shards
from functrain.common._checks import require

_Opened = contextlib.AbstractContextManager[ArrayFile]
_READERS: dict[str, Callable[[str], _Opened]] = {
    INDEX: open_shards,
    ".safetensors": open_safetensors,
    ".npz": open_npz,
    ".keras": open_keras,
    ".h5": open_hdf5,
    ".hdf5": open_hdf5,
}


def open_arrays(path: str, manifest: Mapping[str, Any] | None = None) -> _Opened:
    """Opens a checkpoint, whose manifest is given, or the weights of another program."""
    opened = find_weights(path) if manifest is None else open_checkpoint(path, manifest)
    if opened is None:
        raise CheckpointMismatchError(
            f"{path}: expected a checkpoint's directory, one of Orbax or of safetensors, or a file "
            f"named {', '.join(_READERS)}, got something else. Convert it."
        )
    return opened


def find_weights(path: str) -> _Opened | None:
    """Returns the weights that another program wrote, still closed; None if there are none."""
    suffix = next((suffix for suffix in _READERS if path.lower().endswith(suffix)), None)
    if suffix is not None:
        return _READERS[suffix](path)
    files = files_at(path)
    names = files.find(path, f"*{INDEX}") or files.find(path, "*.safetensors")
    if names:
        _require_one_model(path, names + files.find(path, METADATA))
        return open_arrays(f"{path}/{names[0]}")
    items = find_items(path)
    return open_orbax(items) if items else None


def _require_one_model(path: str, names: list[str]) -> None:
    """Raises an error for several models, or for one of several files without their index."""
    advice = "Pass the path of one of them."
    require(len(names) == 1, path, "one model", names, advice, error=CheckpointMismatchError)
    part = re.search(r"-\d{5}-of-(\d{5})\.safetensors$", names[0])
    is_whole = part is None or int(part[1]) == 1
    expected, advice = f"an index of its files, *{INDEX}", "Download or save all of them again."
    require(is_whole, path, expected, names, advice, error=CheckpointCorruptError)
