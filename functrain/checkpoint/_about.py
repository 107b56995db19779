"""What a checkpoint says of itself: one file of JSON, sealed by a digest, that people can read.

What is in the file is believed only as far as it makes sense: whoever reads it further on meets
names, numbers and texts where they are to be, and nothing else.
"""

import json
import math
import operator
import os
import re
import stat
import zlib
from collections.abc import Callable, Mapping
from typing import Any

import jax.numpy as jnp

from functrain.checkpoint._documents import decode
from functrain.checkpoint._errors import CheckpointCorruptError, CheckpointMismatchError
from functrain.common._checks import is_whole

FORMAT = 1
ABOUT, ARRAYS = "checkpoint.json", "arrays"
_HALVES = "surrogatepass"  # half of a surrogate pair is a text for Python


def write_about(directory: str, about: Mapping[str, Any], leaves: Mapping[str, Any]) -> None:
    """Writes it, one line for each thing; its bytes are on the disk when it returns."""

    def lines(found: Mapping[str, Any], indent: str) -> str:
        return ",\n".join(f"{indent}{_json(n)}: {_json(x)}" for n, x in found.items())

    about = {"format": FORMAT, **about}
    body = f'{lines(about, "  ")},\n  "leaves": {{\n{lines(leaves, "    ")}\n  }}'
    seal = _seal({**about, "leaves": leaves})
    with open(os.path.join(directory, ABOUT), "w", encoding="utf-8", errors=_HALVES) as file:
        file.write(f'{{"checkpoint": {{\n{body}\n}}, "crc32": "{seal}"}}\n')
        file.flush()
        os.fsync(file.fileno())


def read_about(directory: str) -> dict[str, Any]:
    """Returns what a checkpoint says of itself, of run, documents and values at least nothing.

    Raises:
      CheckpointMismatchError: There is no checkpoint, or one of a newer functrain.
      CheckpointCorruptError: There is one, which says nothing that could be read, or nonsense.
    """
    path = os.path.join(directory, ABOUT)
    if not is_ours(directory):
        raise CheckpointMismatchError(
            f"{directory}: expected a checkpoint, got {what(directory)}. Load what functrain.save "
            "wrote, or the directory of one step of a functrain.Checkpointer."
        )
    _require_plain_files(directory)
    try:
        with open(path, encoding="utf-8", errors=_HALVES) as file:
            whole = json.load(file)
        body = {**whole["checkpoint"]}
        good = whole["crc32"] == _seal(body)
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise CheckpointCorruptError(
            f"{path}: expected what a checkpoint says of itself, got "
            f"{'no such file' if isinstance(error, FileNotFoundError) else 'what cannot be read'}. "
            "The checkpoint is damaged: take another."
        ) from error
    if not good:
        raise CheckpointCorruptError(
            f"{path}: its digest is not that of its text. It is damaged, or was edited: take "
            "another checkpoint."
        )
    _require_format(directory, body)
    _require_sense(path, body)
    return {"run": {}, "documents": {}, **body, "values": decode(body.get("values", {}), {})}


def is_ours(directory: str) -> bool:
    """Whether a directory is a checkpoint, damaged or not."""
    about, arrays = (os.path.join(directory, name) for name in (ABOUT, ARRAYS))
    return os.path.isdir(directory) and (os.path.lexists(about) or os.path.isdir(arrays))


def what(path: str) -> str:
    """Names what stands at a path, for error messages."""
    if not os.path.lexists(path):
        return "nothing"
    if not os.path.isdir(path):
        return "a file"
    if os.path.lexists(os.path.join(path, ABOUT)):
        return "a checkpoint"
    steps = sorted(name for name in os.listdir(path) if is_step(name))
    if steps:
        return f"a directory of checkpoints, the last of which is {steps[-1]}"
    return "something else"


def is_step(name: str) -> bool:
    """Whether a name is that of a step's checkpoint: twelve digits."""
    return len(name) == 12 and name.isascii() and name.isdigit()


def _require_plain_files(directory: str) -> None:
    """Refuses links, which lead elsewhere, and pipes and devices, which may never end."""
    for folder, folders, files in os.walk(directory):
        for name in (*folders, *files):
            path = os.path.join(folder, name)
            try:
                mode = os.lstat(path).st_mode
            except FileNotFoundError:  # it is being removed
                continue
            if not (stat.S_ISDIR(mode) or stat.S_ISREG(mode)):
                kind = "a symbolic link" if stat.S_ISLNK(mode) else "another thing"
                raise CheckpointCorruptError(
                    f"{path}: expected a file or a directory, got {kind}. Nobody who saves a "
                    "checkpoint puts such into it: take another."
                )


def _require_format(directory: str, body: Mapping[str, Any]) -> None:
    found = body.get("format")
    if is_whole(found, FORMAT + 1):
        run = body.get("run")
        version = run.get("functrain", "?") if isinstance(run, dict) else "?"
        raise CheckpointMismatchError(
            f"{directory}: expected a checkpoint of format {FORMAT} at most, got one of format "
            f"{found}, written by functrain {version}. Load it with that version."
        )


def _require_sense(path: str, body: Mapping[str, Any]) -> None:
    """Refuses what no functrain writes: the digest was made for other words than ours."""
    needed = dict.fromkeys(("format", "trees", "leaves"))
    wrong = [n for n, x in {**needed, **body}.items() if n in _SENSE and not _makes_sense(n, x)]
    if wrong:
        raise CheckpointCorruptError(
            f"{path}: expected what a checkpoint says of itself, got what makes no sense at "
            f"{', '.join(map(repr, wrong[:3]))[:200]}. It is damaged, or was edited: take another "
            "checkpoint."
        )


def _makes_sense(name: str, found: Any) -> bool:
    try:
        return bool(_SENSE[name](found))
    except (AttributeError, KeyError, TypeError, ValueError):  # it is of another type
        return False


def _is_count(found: Any) -> bool:
    return is_whole(found, 0)


def _is_number(found: Any) -> bool:
    if isinstance(found, dict):
        return found.keys() == {"$float"} and found["$float"] in ("nan", "inf", "-inf")
    return isinstance(found, int | float)


def _is_leaf(found: Any) -> bool:
    crc32 = found.get("crc32", "")
    dtype, shape = parsed(found.get("stored", found["spec"]))
    known = _are_parts(crc32, len(shape)) if isinstance(crc32, dict) else isinstance(crc32, str)
    there = math.prod(shape) == 0 or bool(crc32)
    return isinstance(found["spec"], str) and known and there and not dtype.hasobject


def _are_parts(found: dict[str, Any], axes: int) -> bool:
    """Whether digests are those of parts of an array, by places such as ``0:4,8:16``."""
    where = re.compile(r"\d+:\d+" + r",\d+:\d+" * (axes - 1))
    return all(where.fullmatch(n) and isinstance(x, str) for n, x in found.items())


def parsed(spec: str) -> tuple[jnp.dtype, tuple[int, ...]]:
    """Returns the dtype and the shape that a spec names, such as ``float32[8, 3]``.

    Raises:
      ValueError: It names none.
      TypeError: There is no such dtype.
    """
    found = re.fullmatch(r"([<>]?\w+)\[((?:\d+(?:, \d+)*)?)\]", spec)
    if found is None:
        raise ValueError(f"expected a spec such as float32[8, 3], got {spec[:100]!r}")
    return jnp.dtype(found[1]), tuple(int(n) for n in found[2].split(", ") if n)


_POSITION = {"step", "epoch", "batch"}
_SENSE: dict[str, Callable[[Any], bool]] = {
    "format": lambda found: is_whole(found, 1),
    "step": _is_count,
    "position": lambda found: found.keys() <= _POSITION and all(map(_is_count, found.values())),
    "values": lambda found: all(map(_is_number, found.values())),
    "trees": lambda found: isinstance(found, list) and all(isinstance(x, str) for x in found),
    **dict.fromkeys(("run", "documents", "data"), lambda found: isinstance(found, dict)),
    "leaves": lambda found: all(map(_is_leaf, found.values())),
    "files": lambda found: all(re.fullmatch(r"\d+( [0-9a-f]{8})?", x) for x in found.values()),
    "epoch_over": lambda found: isinstance(found, bool),
    "done": lambda found: (
        found is None or (_is_count(found["epochs"]) and isinstance(found["stopped"], bool))
    ),
}


def _json(value: Any, **how: Any) -> str:
    number = operator.methodcaller("item")  # of NumPy's
    return json.dumps(value, ensure_ascii=False, allow_nan=False, default=number, **how)


def _seal(body: Any) -> str:
    return f"{zlib.crc32(_json(body, sort_keys=True).encode(errors=_HALVES)):08x}"
