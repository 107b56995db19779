"""Arrays out of files of others: safetensors, HDF5, and the archives that Keras saves.

No file is trusted: nothing is unpickled, no code is run, no class is looked up by a name in a file,
and no memory is taken for an array before its shape and dtype are those that are wanted.
"""

import contextlib
import json
import os
import shutil
import tempfile
import zipfile
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import IO, Any, NamedTuple

import jax.numpy as jnp
import numpy as np

from functrain.checkpoint._errors import CheckpointCorruptError, CheckpointMismatchError
from functrain.common._library import needed


class Arrays(NamedTuple):
    """The arrays of a file that is open.

    Attributes:
      specs: Dtype and shape of each, such as ``float32[8, 3]``, by path.
      read: Given paths, yields each with its array.
    """

    specs: Mapping[str, str]
    read: Callable[[Iterable[str]], Iterator[tuple[str, np.ndarray]]]


def opened(path: str) -> contextlib.AbstractContextManager[Arrays]:
    """Opens a file by its suffix.

    Raises:
      CheckpointMismatchError: It is of no kind that is known.
      CheckpointCorruptError: It is of a known kind, and damaged.
      ImportError: The library is missing that reads it.
    """
    kinds = {".safetensors": _safetensors, ".keras": _keras, ".h5": _hdf5, ".hdf5": _hdf5}
    suffix = os.path.splitext(path)[1].lower()
    if suffix not in kinds:
        raise CheckpointMismatchError(
            f"{path}: expected a checkpoint's directory, or a file named {', '.join(kinds)}, got "
            f"{f'one named {suffix}' if suffix else 'a file without a suffix'}."
        )
    _require_no_pickle(path)
    return kinds[suffix](path)


def import_safetensors() -> Any:
    """Returns the library, or says how to install it."""
    to_install = "safetensors files need the library: pip install 'functrain[safetensors]'"
    needed("safetensors.numpy", to_install)
    return needed("safetensors", to_install)


def _require_no_pickle(path: str) -> None:
    """Refuses what torch.save and pickle write, under any name."""
    with open(path, "rb") as file:
        first = file.read(2)
    protocol = first[:1] == b"\x80" and first[1:] <= b"\x05"
    if protocol or (first == b"PK" and not path.lower().endswith(".keras")):
        what = "a pickle" if protocol else "a zip archive, as torch.save writes it"
        raise CheckpointMismatchError(
            f"{path}: expected what its name says, got {what}. Nothing is unpickled here: that can "
            "run code. Where you trust it, load it with what wrote it, and save its arrays with "
            "safetensors."
        )


def _damaged(path: str, error: Exception) -> CheckpointCorruptError:
    kind = os.path.splitext(path)[1]
    return CheckpointCorruptError(
        f"{path}: expected a whole {kind} file, got one that cannot be read: {error}. It is "
        "damaged, cut short, or of another kind than its name says."
    )


# As safetensors names dtypes.
_DTYPES = {
    "BOOL": "bool",
    **{f"I{n}": f"int{n}" for n in (8, 16, 32, 64)},
    **{f"U{n}": f"uint{n}" for n in (8, 16, 32, 64)},
    **{f"F{n}": f"float{n}" for n in (16, 32, 64)},
    "BF16": "bfloat16",
    "C64": "complex64",
    "F8_E4M3": "float8_e4m3fn",
    "F8_E5M2": "float8_e5m2",
    "F8_E4M3FNUZ": "float8_e4m3fnuz",
    "F8_E5M2FNUZ": "float8_e5m2fnuz",
    "F8_E8M0": "float8_e8m0fnu",
}


@contextlib.contextmanager
def _safetensors(path: str) -> Iterator[Arrays]:
    library = import_safetensors()
    try:
        # Compares the header with the length of the file, and its offsets with each other.
        with library.safe_open(path, framework="numpy"):
            pass
    except library.SafetensorError as error:
        raise _damaged(path, error) from error
    # The library itself gives arrays of NumPy's own dtypes and bfloat16 only, not of fp8.
    with open(path, "rb") as file:
        length = int.from_bytes(file.read(8), "little")
        header = json.loads(file.read(length))
        header.pop("__metadata__", None)

        def read(names: Iterable[str]) -> Iterator[tuple[str, np.ndarray]]:
            for name in names:
                said = header[name]
                array = np.empty(said["shape"], jnp.dtype(_DTYPES[said["dtype"]]))
                file.seek(8 + length + said["data_offsets"][0])
                if file.readinto(array.reshape(-1).view(np.uint8).data) != array.nbytes:
                    raise _damaged(path, EOFError(f"{name} is cut short"))
                yield name, array

        yield Arrays(
            {n: spec(_DTYPES.get(x["dtype"], x["dtype"]), x["shape"]) for n, x in header.items()},
            read,
        )


@contextlib.contextmanager
def _hdf5(path: str, file: IO[bytes] | None = None) -> Iterator[Arrays]:
    """Opens an HDF5 file, or such a file within another; links out of it are not followed."""
    import h5py

    try:
        root = h5py.File(file or path, "r")
    except OSError as error:
        raise _damaged(path, error) from error
    with root:
        found: dict[str, Any] = {}

        def note(name: str, node: Any) -> None:
            if isinstance(node, h5py.Dataset):
                found[name] = node

        def read(names: Iterable[str]) -> Iterator[tuple[str, np.ndarray]]:
            for name in names:
                try:
                    raw = found[name][()]
                except OSError as error:
                    raise _damaged(path, error) from error
                yield name, np.asarray(raw).view(_hdf5_dtype(found[name]))

        try:
            root.visititems(note)
        except (OSError, RuntimeError) as error:
            raise _damaged(path, error) from error
        outside = [n for n, x in found.items() if x.external or x.is_virtual]
        if outside:
            raise CheckpointMismatchError(
                f"{path}: expected arrays within the file, got {outside[0]}, whose values are in "
                "another file. Such files are not read."
            )
        yield Arrays({n: spec(_hdf5_dtype(x), x.shape or ()) for n, x in found.items()}, read)


def _hdf5_dtype(dataset: Any) -> np.dtype:
    """Returns the dtype that is meant: HDF5 has no bfloat16, and Keras says so beside it."""
    meant = dataset.attrs.get("dtype") == "bfloat16" and dataset.dtype.itemsize == 2
    return jnp.dtype("bfloat16") if meant else dataset.dtype


_WEIGHTS = "model.weights.h5"


@contextlib.contextmanager
def _keras(path: str) -> Iterator[Arrays]:
    """Opens the weights in a Keras archive; its config is not looked at."""
    with tempfile.TemporaryFile() as weights:
        try:
            _extract(path, weights)
        except (zipfile.BadZipFile, zlib.error, EOFError, NotImplementedError) as error:
            raise _damaged(path, error) from error
        with _hdf5(path, weights) as arrays:
            yield arrays


def _extract(path: str, file: IO[bytes]) -> None:
    """Copies the weights out of an archive, which compares their CRC-32."""
    with zipfile.ZipFile(path) as archive:
        if _WEIGHTS not in archive.namelist():
            raise CheckpointMismatchError(
                f"{path}: expected an archive with {_WEIGHTS}, as Keras 3 saves it, got one with "
                f"{archive.namelist()[:5]}."
            )
        said = archive.getinfo(_WEIGHTS)
        if said.file_size > max(2**28, 100 * said.compress_size):
            raise CheckpointMismatchError(
                f"{path}: expected {_WEIGHTS} as Keras stores it, got {said.compress_size} bytes "
                f"that stand for {said.file_size}. Such files are not read."
            )
        with archive.open(_WEIGHTS) as weights:
            shutil.copyfileobj(weights, file)
    file.seek(0)


def spec(dtype: Any, shape: Any) -> str:
    """Returns dtype and shape as messages have them."""
    return f"{dtype}[{', '.join(map(str, shape))}]"
