"""The arrays of a checkpoint: written, and read in pieces with their checksums.

The arrays are in the format of safetensors, one file for each process. To restore a piece of a
leaf, only the parts that it touches are read and compared, in small chunks.
"""

import contextlib
import functools
import json
import math
import os
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from functrain.checkpoint import _leaves, _manifest
from functrain.checkpoint._errors import PARSE_ERRORS, CheckpointCorruptError, is_refusal
from functrain.checkpoint._leaves import Box, Leaf, Reader
from functrain.checkpoint._local import arrays_name
from functrain.checkpoint._remote import files_at
from functrain.common import _tree

# Bytes that are written, or read and compared, at once: the memory that it takes beside a leaf.
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
    file: Any, leaves: Mapping[str, Leaf], check: Callable[[], None] = lambda: None
) -> Any:
    """Writes the parts that this process has into an open file.

    `check` is called before each chunk; its exception ends the writing.

    Returns:
      For the manifest, ``[size of the file, size of its header, checksum of its header]``; and by
      leaf, ``[offset in the file, box in the array, checksum]`` for each part.
    """
    header, offset = dict[str, Any](), 0
    for name, leaf in leaves.items():
        for box, array in leaf.shards:
            # A part of an array is stored under the name of the leaf with its box. Dtypes that
            # safetensors lacks are stored as bytes, along one more axis.
            is_complete = _tree.strong_spec(array) == leaf.stored_spec
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
    for name, leaf in leaves.items():
        for box, array in leaf.shards:
            begin = file.tell()
            checksum = _write_in_chunks(file, array, check)
            record = [begin, _box_to_text(box), f"{checksum:08x}"]
            shards.setdefault(name, []).append(record)
    return [len(text) + offset, len(text), f"{zlib.crc32(text):08x}"], shards


def _write_in_chunks(file: Any, array: np.ndarray, check: Callable[[], None]) -> int:
    """Writes the bytes of an array, and returns their checksum."""
    data, checksum = np.ascontiguousarray(array).reshape(-1).view(np.uint8).data, 0
    for begin in range(0, array.nbytes, _CHUNK_BYTES):
        check()
        chunk = data[begin : begin + _CHUNK_BYTES]
        checksum = zlib.crc32(chunk, checksum)
        file.write(chunk)
    return checksum


# Boxes: parts of an array.


def _box_to_text(box: Box) -> str:
    return ",".join(f"{side.start}:{side.stop}" for side in box)


def _text_to_box(text: str) -> Box:
    return tuple(slice(*map(int, side.split(":"))) for side in text.split(",") if side)


def _box_shape(box: Box) -> tuple[int, ...]:
    return tuple(side.stop - side.start for side in box)


def _box_size(box: Box) -> int:
    return math.prod(_box_shape(box))


def _shift(box: Box, origin: Box, sign: int = 1) -> Box:
    """Converts a box relative to another box to one of the whole array; -1 converts it back."""
    pairs = zip(box, origin, strict=True)
    return tuple(slice(x.start + sign * y.start, x.stop + sign * y.start) for x, y in pairs)


def _intersection(a: Box, b: Box) -> Box:
    """Returns the common part of two boxes; a box of size 0 if there is none."""
    sides = []
    for x, y in zip(a, b, strict=True):
        start = max(x.start, y.start)
        sides.append(slice(start, max(start, min(x.stop, y.stop))))
    return tuple(sides)


def _chunk_boxes(shape: tuple[int, ...], itemsize: int) -> Iterator[Box]:
    """Yields boxes of at most 4 MiB that cover an array in the order of its bytes."""
    if not shape:
        yield ()
        return
    # The array is cut along one axis: the first whose slices fit into a chunk.
    axis = 0
    while itemsize * math.prod(shape[axis + 1 :]) > _CHUNK_BYTES:
        axis += 1
    row_bytes = itemsize * math.prod(shape[axis + 1 :])
    rows = max(1, _CHUNK_BYTES // max(1, row_bytes))
    for index in np.ndindex(*shape[:axis]):
        outer = tuple(slice(i, i + 1) for i in index)
        for begin in range(0, shape[axis], rows):
            side = slice(begin, min(begin + rows, shape[axis]))
            yield *outer, side, *_leaves.full_box(shape[axis + 1 :])


def require_complete(record: Mapping[str, Any]) -> None:
    """Raises ValueError unless the parts of a leaf in a manifest make up the array, each once."""
    _, shape = _stored_spec(record)
    boxes = [_text_to_box(text) for _, _, text, _ in record["shards"]]
    # The parts of a sharding are the cells of a grid. Their sizes alone could add up even if one
    # part is there twice and another one is missing.
    cell_count = 1
    for axis, length in enumerate(shape):
        sides = sorted({(box[axis].start, box[axis].stop) for box in boxes})
        starts, stops = [start for start, _ in sides], [stop for _, stop in sides]
        if [*starts, length] != [0, *stops]:
            raise ValueError("parts of it are missing, or outside of it")
        cell_count *= len(sides)
    if not len(boxes) == len(set(map(_box_to_text, boxes))) == cell_count:
        raise ValueError("parts of it are missing, or there twice")


def _stored_spec(record: Mapping[str, Any]) -> tuple[np.dtype[Any], tuple[int, ...]]:
    """Returns dtype and shape of the stored array; raises ValueError if they are not the leaf's."""
    spec = record["spec"]
    if not spec.startswith("key<"):
        if "stored" in record:
            raise ValueError(f"it is stored as {record['stored'][:100]!r}")
        return _manifest.parse_spec(spec)
    # A key is stored as its key data, which have further axes.
    dtype, shape = _manifest.parse_spec(record["stored"])
    if dtype != np.uint32 or spec.partition(">")[2] != f"[{', '.join(map(str, shape[:-1]))}]":
        raise ValueError(f"it is stored as {record['stored'][:100]!r}")
    return dtype, shape


# Reading arrays.


class _StoredArrays(contextlib.ExitStack):
    """The arrays of a checkpoint. As a context manager, it closes their files."""

    def __init__(self, directory: str, manifest: Any, check: Callable[[], None]) -> None:
        super().__init__()
        self._directory, self._manifest, self._check = directory, manifest, check
        self._files: dict[int, Any] = {}
        self._complete = set[str]()  # names of leaves
        self._verified = set[tuple[int, int]]()  # process and offset of shards

    def read(self, name: str, box: Box | None = None) -> np.ndarray:
        """Returns the part of an array in a box, or all of it, after comparing checksums."""
        # Every entry of a crafted manifest may be wrong, so all of it is checked in here.
        try:
            record = self._manifest["leaves"][name]
            dtype, shape = _stored_spec(record)
            # Once for a leaf, although its pieces are read one after the other.
            if name not in self._complete:
                require_complete(record)
                self._complete.add(name)
            box = _leaves.full_box(shape) if box is None else box
            needed_shards = []
            for process, offset, text, checksum in record["shards"]:
                shard_box = _text_to_box(text)
                # A checkpoint of many processes has many files: only those needed are opened.
                if _box_size(_intersection(shard_box, box)):
                    # Before memory is taken: a crafted spec may ask for terabytes.
                    self._require_bytes(process, offset, _box_size(shard_box) * dtype.itemsize)
                    needed_shards.append((process, offset, shard_box, checksum))
            result = np.empty(_box_shape(box), dtype)
            for shard in needed_shards:
                self._read_shard(*shard, result, box)
        except PARSE_ERRORS as error:
            if is_refusal(error):
                raise
            raise CheckpointCorruptError(getattr(error, "strerror", None) or error) from error
        return result

    def _require_bytes(self, process: int, offset: int, count: int) -> None:
        size = self._open(process).seek(0, os.SEEK_END)
        if not 0 <= offset <= offset + count <= size:
            raise ValueError("its file is cut short")

    def _read_shard(
        self, process: int, offset: int, shard_box: Box, checksum: str, result: np.ndarray, box: Box
    ) -> None:
        """Copies the part of a shard that is in a box, chunk by chunk, and compares its checksum.

        A shard that was verified before is not verified again: its other chunks are skipped.
        """
        file, crc32, dtype = self._open(process), 0, result.dtype
        is_verified = (process, offset) in self._verified
        file.seek(offset)
        for chunk in _chunk_boxes(_box_shape(shard_box), dtype.itemsize):
            self._check()
            chunk_box = _shift(chunk, shard_box)
            common = _intersection(chunk_box, box)
            chunk_bytes = _box_size(chunk) * dtype.itemsize
            if is_verified and not _box_size(common):
                file.seek(chunk_bytes, os.SEEK_CUR)
                continue
            chunk_data = file.read(chunk_bytes)
            crc32 = zlib.crc32(chunk_data, crc32)
            if _box_size(common):
                # The ellipsis makes an index of a scalar return an array, too.
                target: Any = (*_shift(common, box, -1), ...)
                source: Any = (*_shift(common, chunk_box, -1), ...)
                array = np.frombuffer(chunk_data, dtype).reshape(_box_shape(chunk))
                result[target] = array[source]
        # A CRC detects accidents, not attackers.
        if not is_verified and f"{crc32:08x}" != checksum:
            raise ValueError("other bytes than were saved")
        self._verified.add((process, offset))

    def _open(self, process: int) -> Any:
        if process not in self._files:
            name = arrays_name(process, self._manifest["save_id"])
            file = files_at(self._directory).open(os.path.join(self._directory, name))
            self._files[process] = self.enter_context(file)
        return self._files[process]


def read_leaves(
    directory: str,
    manifest: Mapping[str, Any],
    uses: Mapping[str, Callable[[Reader], Any]],
    check: Callable[[], None] = lambda: None,
    faults: Sequence[str] = (),
) -> dict[str, Any]:
    """Reads leaves one after the other, and returns a result for each.

    Args:
      directory: The checkpoint.
      manifest: Its manifest.
      uses: For each leaf a function that is given a reader. Only its result stays in memory.
      check: Called before each chunk; its exception ends the reading.
      faults: Damage that is known already: one CheckpointCorruptError names all of it.
    """
    results, lines = dict[str, Any](), list(faults)
    with _StoredArrays(directory, manifest, check) as stored:
        for name, use in uses.items():
            try:
                result = use(functools.partial(stored.read, name))
            except CheckpointCorruptError as error:
                spec = manifest["leaves"][name]["spec"]
                lines.append(f"{_leaves.leaf_path(name)}: {spec}: {error}")
                results.clear()
            else:
                if not lines:
                    results[name] = result
                del result  # the name would keep it in memory while the next leaf is read
    if lines:
        raise CheckpointCorruptError(
            f"{directory}: its bytes are not those that were saved:\n{_tree.bullets(lines)}\n"
            "The checkpoint is damaged: take another."
        )
    return results


def read_array(
    directory: str, manifest: Mapping[str, Any], name: str, box: Box | None = None
) -> np.ndarray:
    """Reads one leaf as it is stored, or the part of it in a box."""
    array: np.ndarray = read_leaves(directory, manifest, {name: lambda read: read(box)})[name]
    return array
