"""Readers of files of arrays: checkpoints, safetensors, HDF5 and Keras archives.

No file is trusted: nothing is unpickled, no code is run, and specs are known before any array is
read.
"""

import contextlib
import json
import os
import shutil
import tempfile
import types
import zipfile
import zlib
from collections.abc import Callable, Iterator, Mapping
from typing import IO, Any, NamedTuple

import jax.numpy as jnp
import numpy as np

from functrain.checkpoint import _leaves
from functrain.checkpoint._arrays import DTYPES, StoredArrays
from functrain.checkpoint._errors import CheckpointMismatchError, corrupt_on
from functrain.checkpoint._manifest import STATE
from functrain.common import _tree
from functrain.common._library import import_optional


class ArrayFile(NamedTuple):
    """An open file of arrays.

    Attributes:
      specs: Dtype and shape of each array, such as ``float32[8, 3]``, by path.
      read: Given a path, returns the array.
      layer_names: In a file of Keras, the names of the layers by their groups.
    """

    specs: Mapping[str, str]
    read: Callable[[str], np.ndarray]
    layer_names: Mapping[str, str] = types.MappingProxyType({})


def open_arrays(
    path: str, manifest: Mapping[str, Any] | None = None
) -> contextlib.AbstractContextManager[ArrayFile]:
    """Opens a checkpoint, whose manifest is given, or a file of a format its suffix tells."""
    if manifest is not None:
        return _open_checkpoint(path, manifest)
    readers = {".safetensors": _open_safetensors, ".keras": _open_keras}
    readers |= {".h5": _open_hdf5, ".hdf5": _open_hdf5}
    suffix = os.path.splitext(path)[1].lower()
    if suffix not in readers or "://" in path:
        raise CheckpointMismatchError(
            f"{path}: expected a checkpoint's directory, or a file on disk named "
            f"{', '.join(readers)}, got another file. Convert it, or download it."
        )
    return readers[suffix](path)


@contextlib.contextmanager
def _open_checkpoint(directory: str, manifest: Mapping[str, Any]) -> Iterator[ArrayFile]:
    """Opens the state in a checkpoint; of a finished run, the state that it returned."""
    tree = "final" if "final" in manifest["trees"] else STATE
    leaves = manifest["leaves"]
    names = {_leaves.leaf_path(name): name for name in leaves if _leaves.tree_name(name) == tree}
    specs = {path: leaves[name]["spec"] for path, name in names.items()}
    with StoredArrays(directory, manifest) as stored:
        yield ArrayFile(specs, lambda path: stored.read(names[path]))


@contextlib.contextmanager
def _open_safetensors(path: str) -> Iterator[ArrayFile]:
    to_install = "safetensors files need the library: pip install 'functrain[safetensors]'"
    library = import_optional("safetensors", to_install)
    # Opening it checks the header, its offsets, and the length of the file.
    expected = f"{path}: expected an intact .safetensors file"
    with corrupt_on(library.SafetensorError, expected=expected), library.safe_open(path, "numpy"):
        pass
    # The arrays are read here, because the library returns NumPy's own dtypes and bfloat16, but
    # not float8.
    with open(path, "rb") as file:
        header_length = int.from_bytes(file.read(8), "little")
        header = json.loads(file.read(header_length))
    header.pop("__metadata__", None)

    def read(name: str) -> np.ndarray:
        begin, end = header[name]["data_offsets"]
        offset = 8 + header_length + begin
        data = np.fromfile(path, np.uint8, end - begin, offset=offset)
        array: np.ndarray = data.view(jnp.dtype(dtypes[name])).reshape(header[name]["shape"])
        return array

    dtypes = {name: DTYPES.get(x["dtype"], x["dtype"]) for name, x in header.items()}
    specs = {name: _tree.format_spec(dtypes[name], x["shape"]) for name, x in header.items()}
    yield ArrayFile(specs, read)


# What h5py raises for damaged files.
_HDF5_ERRORS = (AttributeError, LookupError, OSError, RuntimeError, TypeError, ValueError)


@contextlib.contextmanager
def _open_hdf5(path: str, file: IO[bytes] | None = None) -> Iterator[ArrayFile]:
    """Opens an HDF5 file, or one within an archive. Links to other files are not followed."""
    import h5py

    expected = f"{path}: expected an intact {os.path.splitext(path)[1]} file"
    datasets: dict[str, Any] = {}
    layer_names: dict[str, str] = {}

    def add_node(name: str, node: Any) -> None:
        if isinstance(node, h5py.Dataset):
            datasets[name] = node
        # Keras notes the name of a layer at the group of its variables.
        elif isinstance(layer := node.attrs.get("name"), str):
            layer_names[name.removesuffix("vars").rstrip("/")] = layer

    def read(name: str) -> np.ndarray:
        with corrupt_on(*_HDF5_ERRORS, expected=expected):
            raw = datasets[name][()]
        return np.asarray(raw).view(_hdf5_dtype(datasets[name]))

    with contextlib.ExitStack() as stack:
        specs = {}
        with corrupt_on(*_HDF5_ERRORS, expected=expected):
            stack.enter_context(h5py.File(file or path, "r")).visititems(add_node)
            for name, dataset in datasets.items():
                if dataset.external or dataset.is_virtual:
                    raise CheckpointMismatchError(
                        f"{path}: expected arrays within the file, got {name}, which is in another "
                        "file. Copy it into this one."
                    )
                specs[name] = _tree.format_spec(_hdf5_dtype(dataset), dataset.shape or ())
        yield ArrayFile(specs, read, layer_names)


def _hdf5_dtype(dataset: Any) -> np.dtype:
    """Returns the dtype of a dataset. HDF5 has no bfloat16: Keras marks it by an attribute."""
    is_bfloat16 = dataset.attrs.get("dtype") == "bfloat16" and dataset.dtype.itemsize == 2
    return jnp.dtype("bfloat16") if is_bfloat16 else dataset.dtype


@contextlib.contextmanager
def _open_keras(path: str) -> Iterator[ArrayFile]:
    """Opens the weights in a Keras archive, which has checksums. Its config is not read."""
    expected = f"{path}: expected an intact .keras file, as Keras 3 saves it"
    zip_errors = (zipfile.BadZipFile, zlib.error, EOFError, KeyError, NotImplementedError)
    with tempfile.TemporaryFile() as weights:
        with (
            corrupt_on(*zip_errors, expected=expected),
            zipfile.ZipFile(path) as archive,
            archive.open("model.weights.h5") as file,
        ):
            shutil.copyfileobj(file, weights)
        weights.seek(0)
        with _open_hdf5(path, weights) as arrays:
            yield arrays
