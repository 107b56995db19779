"""The arrays of a checkpoint: written and read with their checksums.

The arrays are in the format of safetensors, one file for each process. To restore a piece of a
leaf, only the parts that it touches are read and compared.
"""

import contextlib
import json
import math
import os
import zlib
from collections.abc import Mapping
from typing import Any

import numpy as np

from functrain.checkpoint import _leaves, _manifest
from functrain.checkpoint._errors import PARSE_ERRORS, corrupt_on
from functrain.checkpoint._files import arrays_name, files_at
from functrain.checkpoint._leaves import Box, Leaf
from functrain.common import _tree

# Bytes that are written, or read and compared, at once.
_CHUNK_BYTES = 4 * 2**20

# Dtypes by their names in safetensors. Arrays of other dtypes are stored as bytes.
DTYPES = {"BOOL": "bool", "BF16": "bfloat16", "C64": "complex64", "F8_E4M3": "float8_e4m3fn"}
DTYPES |= {"F8_E5M2": "float8_e5m2", "F8_E8M0": "float8_e8m0fnu"}
DTYPES |= {"F8_E4M3FNUZ": "float8_e4m3fnuz", "F8_E5M2FNUZ": "float8_e5m2fnuz"}
DTYPES |= {"I8": "int8", "I16": "int16", "I32": "int32", "I64": "int64"}
DTYPES |= {"U8": "uint8", "U16": "uint16", "U32": "uint32", "U64": "uint64"}
DTYPES |= {"F16": "float16", "F32": "float32", "F64": "float64"}
_SAFETENSORS_NAMES = dict(zip(DTYPES.values(), DTYPES, strict=True))


def write_arrays(
    file: Any, leaves: Mapping[str, Leaf], metadata: Mapping[str, str] | None = None
) -> tuple[int, int, str, dict[str, Any]]:
    """Writes the parts that this process has into an open file, whose header may have metadata.

    Returns:
      The sizes of the file and of its header, the checksum of the header, and by leaf ``[offset in
      the file, box in the array, checksum]`` for each part.
    """
    header: dict[str, Any] = {} if metadata is None else {"__metadata__": metadata}
    offset = 0
    parts = [(name, *shard) for name, leaf in leaves.items() for shard in leaf.shards]
    for name, box, array in parts:
        # A part of an array is stored under the name of the leaf with its box. Dtypes that
        # safetensors lacks are stored as bytes, along one more axis.
        is_complete = _tree.strong_spec(array) == leaves[name].stored_spec
        dtype = _SAFETENSORS_NAMES.get(str(array.dtype))
        header[name if is_complete else f"{name}[{_box_to_text(box)}]"] = {
            "dtype": dtype or "U8",
            "shape": array.shape if dtype else (*array.shape, array.dtype.itemsize),
            "data_offsets": (offset, offset + array.nbytes),
        }
        offset += array.nbytes
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)  # the format aligns the data to 8 bytes
    text = len(text).to_bytes(8, "little") + text
    shards = dict[str, Any]()
    file.write(text)
    for name, box, array in parts:
        record = [file.tell(), _box_to_text(box), f"{_write_in_chunks(file, array):08x}"]
        shards.setdefault(name, []).append(record)
    return len(text) + offset, len(text), f"{zlib.crc32(text):08x}", shards


def _write_in_chunks(file: Any, array: np.ndarray) -> int:
    """Writes the bytes of an array, and returns their checksum."""
    data, checksum = np.ascontiguousarray(array).reshape(-1).view(np.uint8).data, 0
    for begin in range(0, array.nbytes, _CHUNK_BYTES):
        chunk = data[begin : begin + _CHUNK_BYTES]
        checksum = zlib.crc32(chunk, checksum)
        file.write(chunk)
    return checksum


# Boxes: parts of an array.


def _box_to_text(box: Box) -> str:
    return ",".join(f"{side.start}:{side.stop}" for side in box)


def _text_to_box(text: str) -> Box:
    return tuple(range(*map(int, side.split(":"))) for side in text.split(",") if side)


def _size(box: Box) -> int:
    return math.prod(map(len, box))


def _index_in(origin: Box, box: Box) -> tuple[slice, ...]:
    """Returns the index of a box in the array of another one that contains it."""
    pairs = zip(box, origin, strict=True)
    return tuple(slice(x.start - y.start, x.stop - y.start) for x, y in pairs)


def _intersection(a: Box, b: Box) -> Box:
    """Returns the common part of two boxes; a box of size 0 if there is none."""
    pairs = zip(a, b, strict=True)
    return tuple(range(max(x.start, y.start), min(x.stop, y.stop)) for x, y in pairs)


def is_complete(record: Mapping[str, Any]) -> bool:
    """Returns True if the parts of a leaf in a manifest make up the array, each once."""
    _, shape = _stored_spec(record)
    # The parts of a sharding are cells of a grid, so that two of them are equal or disjoint.
    texts = [text for _, _, text, _ in record["shards"]]
    size = sum(_size(_text_to_box(text)) for text in texts)
    return size == math.prod(shape) and len(set(texts)) == len(texts)


def _stored_spec(record: Mapping[str, Any]) -> tuple[np.dtype[Any], tuple[int, ...]]:
    """Returns dtype and shape of the stored array."""
    # A key is stored as its key data, which have further axes.
    return _manifest.parse_spec(record.get("stored", record["spec"]))


# Reading arrays.


class StoredArrays(contextlib.ExitStack):
    """The arrays of a checkpoint. As a context manager, it closes their files."""

    def __init__(self, directory: str, manifest: Any) -> None:
        super().__init__()
        self.directory, self.manifest = directory, manifest
        self._storage, self._files = files_at(directory), dict[int, Any]()
        # Devices ask for one part after the other, often out of the same shard.
        self._last_shard: tuple[Any, np.ndarray] = (None, np.zeros(0))

    def read(self, name: str, index: tuple[slice, ...] | None = None) -> np.ndarray:
        """Returns the part of an array at an index, or all of it, after comparing checksums.

        Raises CheckpointCorruptError, which names the leaf.
        """
        # Every entry of a crafted manifest may be wrong, so all of it is checked in here.
        expected = f"{self.directory}: expected the bytes of {_leaves.leaf_path(name)} as saved"
        with corrupt_on(*PARSE_ERRORS, expected=expected):
            record = self.manifest["leaves"][name]
            dtype, shape = _stored_spec(record)
            if not is_complete(record):
                raise ValueError("parts of it are missing, or there twice")
            box = _leaves.box_at(index, shape)
            box_shape = tuple(map(len, box))
            result: np.ndarray | None = None
            for process, offset, text, checksum in record["shards"]:
                shard_box = _text_to_box(text)
                common = _intersection(shard_box, box)
                # A checkpoint of many processes has many files: only those needed are opened.
                if _size(common):
                    location = process, offset, _size(shard_box) * dtype.itemsize
                    data = self._read_shard(*location, checksum)
                    shard = data.view(dtype).reshape(tuple(map(len, shard_box)))
                    if shard_box == box:
                        return shard
                    self._last_shard = location, data
                    result = np.empty(box_shape, dtype) if result is None else result
                    result[_index_in(box, common)] = shard[_index_in(shard_box, common)]
            return np.empty(box_shape, dtype) if result is None else result

    def require_files(self) -> None:
        """Raises CheckpointCorruptError if a file is missing or has another size; reads none."""
        expected = f"{self.directory}: expected the files of its arrays as saved"
        with corrupt_on(*PARSE_ERRORS, expected=expected):
            records = self.manifest["leaves"].values()
            processes = {process for record in records for process, *_ in record["shards"]}
            size = sum(self._open(process).seek(0, os.SEEK_END) for process in processes)
            if size != self.manifest["bytes"]:
                raise ValueError(f"{size} bytes instead of {self.manifest['bytes']}")

    def _read_shard(self, process: int, offset: int, count: int, checksum: str) -> np.ndarray:
        """Returns the bytes of a shard, after comparing their checksum."""
        if self._last_shard[0] == (process, offset, count):
            return self._last_shard[1]
        self._last_shard = (None, np.zeros(0))  # lets go of its memory
        file = self._open(process)
        # Before memory is taken: a crafted spec may ask for terabytes.
        if not 0 <= offset <= file.seek(0, os.SEEK_END) - count:
            raise ValueError("its file is cut short")
        crc32, data = 0, np.empty(count, np.uint8)
        file.seek(offset)
        for begin in range(0, count, _CHUNK_BYTES):
            with self._storage.errors(self.directory):
                chunk = file.read(min(_CHUNK_BYTES, count - begin))
            crc32 = zlib.crc32(chunk, crc32)
            data[begin : begin + _CHUNK_BYTES] = np.frombuffer(chunk, np.uint8)
        # A CRC detects accidents, not attackers.
        if f"{crc32:08x}" != checksum:
            raise ValueError("other bytes than were saved")
        return data

    def _open(self, process: int) -> Any:
        if process not in self._files:
            name = arrays_name(process, self.manifest["save_id"])
            path = os.path.join(self.directory, name)
            try:
                with self._storage.errors(path):
                    self._files[process] = self.enter_context(self._storage.open(path))
            except FileNotFoundError:
                raise ValueError("its file is missing") from None
        return self._files[process]
