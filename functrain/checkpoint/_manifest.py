"""The manifest of a checkpoint: one readable JSON file, protected by a checksum.

It holds the position of the training, the environment it ran in, the documents of hooks and
loaders, and for each leaf its dtype, its shape, where its bytes are, and their checksums. The
arrays of documents are stored with the other leaves. Nothing is unpickled, and no class is looked
up by a name in a file.
"""

import base64
import functools
import json
import os
import platform
import re
import zlib
from collections.abc import Callable, Mapping
from importlib import metadata
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from functrain._version import __version__
from functrain.checkpoint._errors import PARSE_ERRORS, CheckpointMismatchError, corrupt_on
from functrain.checkpoint._files import MANIFEST, files_at, is_part, is_step_name, steps_in
from functrain.common import _tree
from functrain.common._types import PyTree

FORMAT = 3
STATE, DOCUMENTS, FILE = "state", "documents", "file"  # names of trees


def format_manifest(entries: Mapping[str, Any], leaves: Mapping[str, Any]) -> bytes:
    """Returns the file of a manifest, with one entry per line."""
    # The checksum is that of the values, so the layout of the text is free.
    entries = {"format": FORMAT, **entries}
    checksum = _checksum({**entries, "leaves": leaves})
    body = f'{_json_lines(entries, "  ")},\n  "leaves": {{\n{_json_lines(leaves, "    ")}\n  }}'
    return f'{{"checkpoint": {{\n{body}\n}}, "crc32": "{checksum}"}}\n'.encode("ascii")


def read_manifest(directory: str) -> dict[str, Any]:
    """Returns the manifest of a checkpoint, if it is intact and of this format.

    Raises FileNotFoundError if nothing is there, or only what a killed save left.
    """
    files = files_at(directory)
    if not files.has(directory, [MANIFEST]):
        raise _no_checkpoint(directory, files.names(directory))
    path = os.path.join(directory, MANIFEST)
    with corrupt_on(*PARSE_ERRORS, expected=f"{path}: expected the manifest of a checkpoint"):
        sealed = json.loads(files.read(path))
        manifest = {"run": {}, "documents": {}, "values": {}, **sealed["checkpoint"]}
        if sealed["crc32"] != _checksum(sealed["checkpoint"]):
            raise ValueError("its checksum does not match")
        if manifest["format"] != FORMAT:
            version = manifest["run"].get("functrain", "?")
            raise CheckpointMismatchError(
                f"{directory}: expected a checkpoint of format {FORMAT}, got one of format "
                f"{manifest['format']}, written by functrain {version}. Load it with that version."
            )
        # A renamed one would be taken for that of another step.
        step, name = manifest.get("position", {}).get("step"), os.path.basename(directory)
        if step is not None and is_step_name(name) and int(name) != step:
            raise ValueError(f"it is the checkpoint of step {step}")
        manifest["values"] = {name: float(x) for name, x in manifest["values"].items()}
    return manifest


def _no_checkpoint(directory: str, names: set[str]) -> Exception:
    """Returns an error that says what is in a directory without a manifest."""
    expected = f"{directory}: expected a checkpoint"
    if all(map(is_part, names)):
        return FileNotFoundError(f"{expected}, got nothing. Check the path.")
    if steps := steps_in(names):
        return CheckpointMismatchError(
            f"{expected}, got the directory of a Checkpointer with those of the steps "
            f"{', '.join(map(str, steps[-8:]))}. Load one of them, such as "
            f"{directory}/{steps[-1]:012d}, or the last one with Checkpointer.restore."
        )
    return CheckpointMismatchError(
        f"{expected}, got something else. "
        "Load what functrain.save wrote, or the directory of one step of a Checkpointer."
    )


def parse_spec(spec: str) -> tuple[np.dtype[Any], tuple[int, ...]]:
    """Returns dtype and shape of a spec such as ``float32[8, 3]``.

    Raises ValueError for another form or for objects, which are pointers; TypeError for an unknown
    dtype.
    """
    # NumPy writes the byte order of its dtypes as "<" or ">".
    match = re.fullmatch(r"([<>]?\w+)\[((?:\d+(?:, \d+)*)?)\]", spec)
    if match is not None:
        dtype = jnp.dtype(match[1])
        if not dtype.hasobject:
            return dtype, tuple(map(int, re.findall(r"\d+", match[2])))
    raise ValueError(f"expected a spec such as float32[8, 3], got {spec[:100]!r}")


def _to_json(value: Any, **options: Any) -> str:
    return json.dumps(value, default=lambda number: number.item(), **options)


def _json_lines(entries: Mapping[str, Any], indent: str) -> str:
    """Formats the entries of a JSON object, one per line."""
    return ",\n".join(f"{indent}{json.dumps(name)}: {_to_json(x)}" for name, x in entries.items())


def _checksum(body: Any) -> str:
    return f"{zlib.crc32(_to_json(body, sort_keys=True).encode()):08x}"


# The environment: everything besides the program that can change the last bits of a result.


def fingerprint(state: PyTree) -> dict[str, Any]:
    """Returns versions, devices and cores of this process, and the meshes of a state."""
    device, cores = jax.devices()[0], getattr(os, "sched_getaffinity", None)
    shardings = (getattr(leaf, "sharding", None) for leaf in jax.tree.leaves(state))
    meshes = {str(dict(x.mesh.shape)) for x in shardings if isinstance(x, jax.NamedSharding)}
    return {
        "functrain": __version__,
        "jax": jax.__version__,
        "jaxlib": metadata.version("jaxlib"),
        "python": platform.python_version(),
        "numpy": np.__version__,  # the order of shuffled data depends on it
        "platform": device.platform,
        "device": device.device_kind,
        "devices": jax.device_count(),
        "processes": jax.process_count(),
        "mesh": sorted(meshes),
        # The last bits of results on CPU change with the number of cores.
        "cores": len(cores(0)) if cores is not None else os.cpu_count(),
    }


def differences(saved: Mapping[str, Any], current: Mapping[str, Any]) -> list[str]:
    """Names the entries of two fingerprints that differ and may change results."""
    # The versions of functrain and Python are stored for information only.
    return [
        f"{name}: saved with {saved.get(name)}, now {current.get(name)}"
        for name in {**saved, **current}
        if name not in ("functrain", "python") and saved.get(name) != current.get(name)
    ]


# Documents: the results of `state()` of hooks and loaders.


def encode(value: Any, name: str, arrays: dict[str, Any]) -> Any:
    """Converts a document to JSON, and adds its arrays to `arrays`, under names below `name`.

    A document consists of dicts, lists and tuples of numbers, texts, bytes, None and arrays.

    Examples:
      >>> arrays = {}
      >>> encode({"best": 0.5, "weights": [np.ones(2)], "size": (3, 4)}, "hook", arrays)
      {'best': 0.5, 'weights': [{'$array': 'hook/weights/0'}], 'size': {'$tuple': [3, 4]}}
      >>> arrays
      {'hook/weights/0': array([1., 1.])}
    """
    if isinstance(value, np.generic):
        value = value.item()
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, bytes):
        return {"$bytes": base64.b64encode(value).decode()}
    if isinstance(value, Mapping):
        if all(isinstance(key, str) and not key.startswith("$") for key in value):
            return {key: encode(x, f"{name}/{key}", arrays) for key, x in value.items()}
        # JSON would turn other keys into texts, and "$" marks the types encoded here.
        keys = [encode(key, name, arrays) for key in value]
        items = [encode(x, f"{name}/{key}", arrays) for key, x in value.items()]
        return {"$items": list(map(list, zip(keys, items, strict=True)))}
    if isinstance(value, list | tuple):
        items = [encode(x, f"{name}/{i}", arrays) for i, x in enumerate(value)]
        return items if isinstance(value, list) else {"$tuple": items}
    if isinstance(value, np.ndarray | jax.Array):
        while name in arrays:  # {"a/b": x, "a": {"b": y}}, {1: x, "1": y}
            name += "'"
        arrays[name] = value
        key = {"$key": str(jax.random.key_impl(value))} if _tree.is_key(value) else {}
        return {"$array": name, **key}
    # Known by its module, since functrain does not import torch.
    if hasattr(value, "numpy") and type(value).__module__ == "torch":
        return {"$tensor": encode(value.numpy(), name, arrays)}
    raise TypeError(
        f"{name}: expected dicts, lists and tuples of numbers, texts and arrays, got "
        f"{type(value).__name__}. Nothing else can be saved without running code when it is loaded."
    )


def decode(document: Any, read: Callable[[str], np.ndarray]) -> Any:
    """Converts a document back from JSON. Arrays are returned as NumPy's, numbers as Python's.

    Args:
      document: The result of `encode`.
      read: Given the name of an array, returns it.
    """
    decode_part = functools.partial(decode, read=read)
    if isinstance(document, list):
        return list(map(decode_part, document))
    if not isinstance(document, dict):
        return document
    # The inverse of the cases in `encode`. No name in a file decides on code that is run.
    match document:
        case {"$bytes": text}:
            return base64.b64decode(text)
        case {"$tuple": items}:
            return tuple(map(decode_part, items))
        case {"$items": pairs}:
            return dict(map(decode_part, pairs))
        case {"$array": name, "$key": impl}:
            return jax.random.wrap_key_data(jnp.asarray(read(name)), impl=impl)
        case {"$array": name}:
            return read(name)
        case {"$tensor": data}:
            import torch

            return torch.from_numpy(decode_part(data))
    return {key: decode_part(x) for key, x in document.items()}
