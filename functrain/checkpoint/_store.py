"""One checkpoint on disk: a directory of arrays, and a file that says what they are.

    checkpoint.json   every leaf's spec and CRC-32, and what goes with them; people can read it
    arrays/           the leaves, written by Orbax, flat, under the paths that messages use

Orbax checks its index and not the arrays: a bit that flips on a disk would come back as a weight.
So every leaf has a digest, and what is read is returned only if it has that digest still. A
CRC finds accidents, not attackers.
"""

import json
import os
import zlib
from collections.abc import Iterable, Mapping
from typing import Any

import jax.numpy as jnp
import numpy as np

from functrain.checkpoint._errors import CheckpointCorruptError, CheckpointMismatchError
from functrain.checkpoint._leaves import Leaf, digest, path_of
from functrain.common import _tree

FORMAT = 1
ABOUT, ARRAYS = "checkpoint.json", "arrays"


def write(directory: str, leaves: Mapping[str, Leaf], about: Mapping[str, Any]) -> None:
    """Writes a checkpoint; its bytes are on the disk when it returns.

    Args:
      directory: A new one.
      leaves: By name.
      about: What goes with them, as JSON has it.
    """
    from orbax.checkpoint import v1 as ocp

    os.makedirs(directory)
    # Orbax rejects arrays of size zero and trees without leaves; the specs say all of the former.
    arrays = {name: leaf.array for name, leaf in leaves.items() if leaf.numpy.size}
    ocp.save(os.path.join(directory, ARRAYS), arrays or {"(empty)": np.zeros(1)})
    said = {name: _said(leaf) for name, leaf in leaves.items()}
    body = {"format": FORMAT, **about, "leaves": said}
    with open(os.path.join(directory, ABOUT), "w", encoding="utf-8") as file:
        file.write(_text(body))
        file.flush()
        os.fsync(file.fileno())
    sync_directory(directory)


def read_about(directory: str) -> dict[str, Any]:
    """Returns what a checkpoint says of itself.

    Raises:
      CheckpointMismatchError: There is no checkpoint, or one of a newer functrain.
      CheckpointCorruptError: There is one, which says nothing that could be read.
    """
    path = os.path.join(directory, ABOUT)
    if not os.path.isfile(path) and not os.path.isdir(os.path.join(directory, ARRAYS)):
        raise CheckpointMismatchError(
            f"{directory}: expected a checkpoint, got {what(directory)}. Load what functrain.save "
            "or a functrain.Checkpointer wrote."
        )
    try:
        with open(path, encoding="utf-8") as file:
            whole = json.load(file)
        body: dict[str, Any] = whole["checkpoint"]
        good = whole["crc32"] == _seal(body)
    except (OSError, ValueError, KeyError, TypeError) as error:
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
    if body["format"] > FORMAT:
        raise CheckpointMismatchError(
            f"{directory}: expected a checkpoint of format {FORMAT} at most, got one of format "
            f"{body['format']}, written by functrain {body.get('run', {}).get('functrain', '?')}. "
            "Load it with that version."
        )
    return body


def read_arrays(
    directory: str, about: Mapping[str, Any], blanks: Mapping[str, np.ndarray]
) -> dict[str, np.ndarray]:
    """Reads leaves into host memory, and compares their digests.

    Args:
      directory: The checkpoint.
      about: What it says of itself.
      blanks: For each leaf to read an array of its shape and dtype.

    Raises:
      CheckpointCorruptError: Names the leaves that cannot be read, or have other bytes.
    """
    leaves = about["leaves"]
    wanted = {name: blank for name, blank in blanks.items() if blank.size}
    found = _read(directory, [n for n, said in leaves.items() if "crc32" in said], wanted)
    wrong = [name for name in wanted if digest(found[name]) != leaves[name]["crc32"]]
    if wrong:
        lines = [f"{path_of(name)}: {leaves[name]['spec']}" for name in wrong]
        raise CheckpointCorruptError(
            f"{directory}: these leaves are not what was saved, by their digests:\n"
            f"{_tree.bullets(lines)}\nThe checkpoint is damaged: take another."
        )
    return {name: found.get(name, blank) for name, blank in blanks.items()}


def _read(
    directory: str, stored: Iterable[str], blanks: Mapping[str, np.ndarray]
) -> Mapping[str, np.ndarray]:
    """Reads some of the arrays that are stored."""
    from orbax.checkpoint import v1 as ocp

    def load(names: Iterable[str]) -> Mapping[str, np.ndarray]:
        wanted = {name: blanks[name] if name in names else ocp.PLACEHOLDER for name in stored}
        found: Mapping[str, np.ndarray] = ocp.load(os.path.join(directory, ARRAYS), wanted)
        return found

    if not blanks:
        return {}
    try:
        return load(blanks)
    except Exception as error:
        lines = []
        for name in blanks:
            try:
                load([name])
            except Exception as cause:
                lines.append(f"{path_of(name)}: {type(cause).__name__}")
        raise CheckpointCorruptError(
            f"{directory}: these leaves cannot be read:\n{_tree.bullets(lines or [str(error)])}\n"
            "The checkpoint is damaged: take another."
        ) from error


def specs(about: Mapping[str, Any]) -> dict[str, str]:
    """Returns each leaf's dtype and shape, by name in the file."""
    return {name: said["spec"] for name, said in about["leaves"].items()}


def blanks(about: Mapping[str, Any], names: Iterable[str]) -> dict[str, np.ndarray]:
    """Returns arrays like those that stand for leaves in the file, to read without a state."""
    found = {name: about["leaves"][name] for name in names}
    return {name: _blank(said.get("stored", said["spec"])) for name, said in found.items()}


def _said(leaf: Leaf) -> dict[str, str]:
    """Returns what is said of a leaf: what stands for it, if that is another; its digest."""
    stored = _tree.strong_spec(leaf.numpy)
    found = {"spec": leaf.spec, **({"stored": stored} if stored != leaf.spec else {})}
    return {**found, "crc32": digest(leaf.numpy)} if leaf.numpy.size else found


def _blank(spec: str) -> np.ndarray:
    dtype, _, shape = spec.removesuffix("]").partition("[")
    return np.empty([int(n) for n in shape.split(", ") if n], jnp.dtype(dtype))


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


def sync_directory(path: str) -> None:
    """Brings a directory's names to the disk, where the system can."""
    if not hasattr(os, "O_DIRECTORY"):  # Windows
        return
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _text(body: Mapping[str, Any]) -> str:
    """Returns a file's text, one line for each thing that is said, and for each leaf."""

    def lines(found: Mapping[str, Any], indent: str) -> str:
        each = (f"{indent}{json.dumps(n)}: {_json(x)}" for n, x in found.items())
        return ",\n".join(each)

    head = lines({name: x for name, x in body.items() if name != "leaves"}, "  ")
    leaves = f'  "leaves": {{\n{lines(body["leaves"], "    ")}\n  }}'
    return f'{{"checkpoint": {{\n{head},\n{leaves}\n}}, "crc32": "{_seal(body)}"}}\n'


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, allow_nan=False)


def _seal(body: Mapping[str, Any]) -> str:
    text = json.dumps(body, sort_keys=True, ensure_ascii=False, allow_nan=False)
    return f"{zlib.crc32(text.encode()):08x}"
