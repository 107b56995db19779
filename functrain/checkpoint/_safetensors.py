"""Reader of safetensors: one file, or several with an index."""

import contextlib
import functools
import json
import math
import os
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from typing import Any

import jax.numpy as jnp
import numpy as np

from functrain.checkpoint._array_files import ArrayFile
from functrain.checkpoint._arrays import DTYPES
from functrain.checkpoint._errors import PARSE_ERRORS, CheckpointCorruptError, corrupt_on
from functrain.checkpoint._files import files_at
from functrain.checkpoint._leaves import Index, box_at
from functrain.common import _tree
from functrain.common._checks import require_no_problems

INDEX = ".safetensors.index.json"
_MAX_HEADER_BYTES = 100 * 2**20  # of the format
_BLOCK_BYTES = 16 * 2**20  # read at once where a part has not all columns


@contextlib.contextmanager
def open_safetensors(path: str) -> Iterator[ArrayFile]:
    """Opens a file, whose header, offsets and length are checked."""
    expected = f"{path}: expected an intact .safetensors file"
    files = files_at(path)
    with contextlib.ExitStack() as stack:
        with corrupt_on(*PARSE_ERRORS, expected=expected):
            with files.errors(path):
                opened = stack.enter_context(files.open(path))
            file = _Input(opened, functools.partial(files.errors, path))
            header, start = _read_header(file)
            dtypes = {name: DTYPES.get(x["dtype"], x["dtype"]) for name, x in header.items()}
            specs = {
                name: _tree.format_spec(dtypes[name], x["shape"]) for name, x in header.items()
            }

        def read(name: str, index: Index | None = None) -> np.ndarray:
            offset = start + header[name]["data_offsets"][0]
            dtype = jnp.dtype(dtypes[name])
            with corrupt_on(ValueError, expected=expected):
                return _read_part(file, offset, dtype, tuple(header[name]["shape"]), index)

        yield ArrayFile(specs, read)


class _Input:
    """An open file. The errors of its storage are not those of its content."""

    def __init__(self, file: Any, errors: Callable[[], AbstractContextManager[None]]) -> None:
        self._file, self._errors = file, errors
        self.seek = file.seek

    def readinto(self, view: memoryview) -> int:
        with self._errors():
            count: int = self._file.readinto(view)
            return count


def _read_header(file: Any) -> tuple[dict[str, Any], int]:
    """Returns the header, and where the arrays begin. Any error means that it is damaged."""
    size = file.seek(0, os.SEEK_END)
    file.seek(0)
    length = int.from_bytes(_read_exactly(file, bytearray(8)), "little")
    if not 0 < length <= min(size - 8, _MAX_HEADER_BYTES):
        raise ValueError("its header is cut short")
    header = json.loads(_read_exactly(file, bytearray(length)).decode())
    header.pop("__metadata__", None)
    end = 0
    for name, entry in sorted(header.items(), key=lambda item: item[1]["data_offsets"]):
        begin, stop = entry["data_offsets"]
        # Others may have dtypes that are unknown here. Such an array can be in the file.
        dtype = DTYPES.get(entry["dtype"])
        count = stop - begin
        if dtype is not None:
            count = jnp.dtype(dtype).itemsize * math.prod(entry["shape"])
        if begin != end or stop - begin != count or min(entry["shape"], default=0) < 0:
            raise ValueError(f"its header contradicts itself at {name}")
        end = stop
    if 8 + length + end != size:
        raise ValueError(f"expected {8 + length + end:,} bytes, got {size:,}")
    return header, 8 + length


def _read_part(
    file: Any, offset: int, dtype: Any, shape: tuple[int, ...], index: Index | None
) -> np.ndarray:
    """Returns the part of an array at an index. Only its rows are read, block by block."""
    box = box_at(index, shape)
    result = np.empty(tuple(map(len, box)), dtype)
    if box[1:] == tuple(map(range, shape[1:])):
        row = math.prod(shape[1:]) * dtype.itemsize
        file.seek(offset + row * (box[0].start if box else 0))
        _read_exactly(file, result.reshape(-1).view(np.uint8).data)
        return result
    row = math.prod(shape[1:])
    count = max(1, _BLOCK_BYTES // max(1, row * dtype.itemsize))
    columns = tuple(slice(side.start, side.stop) for side in box[1:])
    for begin in range(0, len(box[0]), count):
        rows = slice(begin, min(begin + count, len(box[0])))
        block = np.empty((rows.stop - rows.start, *shape[1:]), dtype)
        file.seek(offset + (box[0].start + begin) * row * dtype.itemsize)
        _read_exactly(file, block.reshape(-1).view(np.uint8).data)
        result[rows] = block[:, *columns]
    return result


def _read_exactly(file: Any, buffer: Any) -> Any:
    """Fills a buffer from a file, and returns it."""
    view = memoryview(buffer)
    while len(view):
        count = file.readinto(view)
        if not count:
            raise ValueError("it is cut short")
        view = view[count:]
    return buffer


@contextlib.contextmanager
def open_shards(path: str) -> Iterator[ArrayFile]:
    """Opens the files that an index names, each array in one of them."""
    expected = f"{path}: expected an intact index of safetensors files"
    directory, name = os.path.split(path)
    files = files_at(path)
    with corrupt_on(*PARSE_ERRORS, expected=expected):
        weight_map = dict(json.loads(files.read(path))["weight_map"])
        shards = dict.fromkeys(weight_map.values())
        outside = [shard for shard in shards if os.path.basename(shard) != shard or not shard]
        if outside:
            raise ValueError(f"{outside[0]!r} is not a name of a file beside it")
    present = files.names(directory)
    problems = [f"{shard}: missing" for shard in shards if shard not in present]
    # Files of another save, which the index does not name.
    shard_name = re.compile(re.escape(name.removesuffix(INDEX)) + r"-\d+-of-\d+\.safetensors")
    surplus = [x for x in sorted(present) if shard_name.fullmatch(x) and x not in shards]
    problems += [f"{shard}: not in the index" for shard in surplus]
    _require_whole(path, problems)
    with contextlib.ExitStack() as stack:
        array_files = {
            shard: stack.enter_context(open_safetensors(os.path.join(directory, shard)))
            for shard in shards
        }
        _require_whole(path, _misplaced(weight_map, array_files))
        specs = {name: array_files[shard].specs[name] for name, shard in weight_map.items()}
        yield ArrayFile(
            specs, lambda name, index=None: array_files[weight_map[name]].read(name, index)
        )


def _misplaced(weight_map: Mapping[str, str], shards: Mapping[str, ArrayFile]) -> list[str]:
    """Returns a line for each array that is not in the file that the index names for it."""
    problems = []
    for shard, arrays in shards.items():
        indexed = {name for name, its_shard in weight_map.items() if its_shard == shard}
        problems += [f"{name}: not in {shard}" for name in sorted(indexed - arrays.specs.keys())]
        for name in sorted(arrays.specs.keys() - indexed):
            other = weight_map.get(name)
            entry = "not in the index" if other is None else f"in the index in {other}"
            problems.append(f"{name}: in {shard}, but {entry}")
    return problems


def _require_whole(path: str, problems: list[str]) -> None:
    expected = "the files of the index, each with the arrays that it names"
    advice = "Nothing was taken. Download or save all of them again, into an empty folder."
    require_no_problems(path, problems, expected, advice, error=CheckpointCorruptError)
