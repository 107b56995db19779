"""Readers of files of arrays: checkpoints, HDF5, archives of Keras and of NumPy.

No file is trusted: nothing is unpickled, no code is run, and specs are known before any array is
read.
"""

import contextlib
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
from functrain.checkpoint._arrays import StoredArrays
from functrain.checkpoint._errors import CheckpointMismatchError, corrupt_on
from functrain.checkpoint._files import files_at
from functrain.checkpoint._leaves import Index
from functrain.checkpoint._manifest import STATE
from functrain.common import _tree


class ArrayFile(NamedTuple):
    """An open file of arrays.

    Attributes:
      specs: Dtype and shape of each array, such as ``float32[8, 3]``, by path.
      read: Given a path, and perhaps an index, returns the array or that part of it.
      layer_names: In a file of Keras, the names of the layers by their groups.
    """

    specs: Mapping[str, str]
    read: Callable[..., np.ndarray]
    layer_names: Mapping[str, str] = types.MappingProxyType({})


@contextlib.contextmanager
def open_checkpoint(directory: str, manifest: Mapping[str, Any]) -> Iterator[ArrayFile]:
    """Opens the state in a checkpoint; of a finished run, the state that it returned."""
    tree = "final" if "final" in manifest["trees"] else STATE
    leaves = manifest["leaves"]
    names = {_leaves.leaf_path(name): name for name in leaves if _leaves.tree_name(name) == tree}
    specs = {path: leaves[name]["spec"] for path, name in names.items()}
    with StoredArrays(directory, manifest) as stored:
        yield ArrayFile(specs, lambda path, index=None: stored.read(names[path], index))


_ZIP_ERRORS = (zipfile.BadZipFile, zlib.error, EOFError, KeyError, NotImplementedError)


@contextlib.contextmanager
def open_npz(path: str) -> Iterator[ArrayFile]:
    """Opens the archive of `numpy.savez`, which has checksums."""
    expected = f"{path}: expected an intact .npz file"
    with contextlib.ExitStack() as stack:
        with corrupt_on(*_ZIP_ERRORS, ValueError, expected=expected):
            archive = stack.enter_context(zipfile.ZipFile(_opened(path, stack)))
            members = [x for x in archive.namelist() if x.endswith(".npy")]
            specs = {x.removesuffix(".npy"): _npy_spec(archive, x) for x in members}

        def read(name: str, index: Index | None = None) -> np.ndarray:
            with (
                corrupt_on(*_ZIP_ERRORS, ValueError, expected=expected),
                archive.open(f"{name}.npy") as file,
            ):
                array: np.ndarray = np.lib.format.read_array(file, allow_pickle=False)
            return array if index is None else array[index]

        yield ArrayFile(specs, read)


def _npy_spec(archive: zipfile.ZipFile, member: str) -> str:
    with archive.open(member) as file:
        version = np.lib.format.read_magic(file)
        is_first = version == (1, 0)
        header = (
            np.lib.format.read_array_header_1_0 if is_first else np.lib.format.read_array_header_2_0
        )
        shape, _, dtype = header(file)
    return _tree.format_spec(dtype, shape)


def _opened(path: str, stack: contextlib.ExitStack) -> Any:
    """Returns an open file for a library: at a URL, fsspec's, which ends with the stack."""
    if "://" not in path:
        return path
    files = files_at(path)
    with files.errors(path):
        return stack.enter_context(files.open(path))


# What h5py raises for damaged files.
_HDF5_ERRORS = (AttributeError, LookupError, OSError, RuntimeError, TypeError, ValueError)


@contextlib.contextmanager
def open_hdf5(path: str, file: IO[bytes] | None = None) -> Iterator[ArrayFile]:
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

    def read(name: str, index: Index | None = None) -> np.ndarray:
        with corrupt_on(*_HDF5_ERRORS, expected=expected):
            raw = datasets[name][() if index is None else index]
        return np.asarray(raw).view(_hdf5_dtype(datasets[name]))

    with contextlib.ExitStack() as stack:
        specs = {}
        with corrupt_on(*_HDF5_ERRORS, expected=expected):
            opened = _opened(path, stack) if file is None else file
            stack.enter_context(h5py.File(opened, "r")).visititems(add_node)
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
def open_keras(path: str) -> Iterator[ArrayFile]:
    """Opens the weights in a Keras archive, which has checksums. Its config is not read."""
    expected = f"{path}: expected an intact .keras file, as Keras 3 saves it"
    with tempfile.TemporaryFile() as weights, contextlib.ExitStack() as stack:
        with (
            corrupt_on(*_ZIP_ERRORS, expected=expected),
            zipfile.ZipFile(_opened(path, stack)) as archive,
            archive.open("model.weights.h5") as file,
        ):
            shutil.copyfileobj(file, weights)
        weights.seek(0)
        with open_hdf5(path, weights) as arrays:
            yield arrays
