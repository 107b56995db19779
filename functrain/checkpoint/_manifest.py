"""The manifest of a checkpoint: one file of JSON, sealed by a digest, that people can read.

It holds how far the training had come, what it ran on, the documents of hooks and loaders, and for
each leaf its dtype and shape and where its bytes stand, with their digests. What a document holds
is JSON; its arrays are stored with the other leaves. Nothing is unpickled, and no class is looked
up by a name in a file.
"""

import base64
import contextlib
import io
import json
import math
import os
import platform
import re
import stat
import zlib
from collections.abc import Iterator, Mapping
from importlib import metadata
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from functrain._version import __version__
from functrain.checkpoint._errors import CheckpointCorruptError, CheckpointMismatchError
from functrain.common import _tree
from functrain.common._library import import_optional
from functrain.common._types import PyTree

FORMAT = 2
MANIFEST = "checkpoint.json"
STATE, DOCUMENTS = "state", "documents"  # trees, in front of the names of their leaves


def write_manifest(directory: str, entries: Mapping[str, Any], leaves: Mapping[str, Any]) -> None:
    """Writes the manifest, a line for each entry; its bytes are on the disk when it returns."""
    entries = {"format": FORMAT, **entries}
    lines = [f"  {json.dumps(name)}: {_json(x)}" for name, x in entries.items()]
    leaf_lines = [f"    {json.dumps(name)}: {_json(x)}" for name, x in leaves.items()]
    body = ",\n".join([*lines, '  "leaves": {\n' + ",\n".join(leaf_lines) + "\n  }"])
    digest = _digest({**entries, "leaves": leaves})
    with open(os.path.join(directory, MANIFEST), "w", encoding="ascii") as file:
        file.write(f'{{"checkpoint": {{\n{body}\n}}, "crc32": "{digest}"}}\n')
        file.flush()
        os.fsync(file.fileno())


def read_manifest(directory: str) -> dict[str, Any]:
    """Returns the manifest of a checkpoint.

    Raises:
      CheckpointMismatchError: There is no checkpoint, or one of another format.
      CheckpointCorruptError: Its manifest is damaged.
    """
    if not is_checkpoint(directory):
        raise CheckpointMismatchError(
            f"{directory}: expected a checkpoint, got {kind_of(directory)}. Load what "
            "functrain.save wrote, or the directory of one step of a functrain.Checkpointer."
        )
    path = os.path.join(directory, MANIFEST)
    with understood(f"{path}: expected the manifest of a checkpoint"):
        with open_plain(path) as file:
            sealed = json.load(file)
        body = {"run": {}, "documents": {}, "values": {}, **sealed["checkpoint"]}
        if sealed["crc32"] != _digest(sealed["checkpoint"]):
            raise ValueError("other text than its digest was made of")
        if body["format"] != FORMAT:
            raise CheckpointMismatchError(
                f"{directory}: expected a checkpoint of format {FORMAT}, got one of format "
                f"{body['format']}, written by functrain {body['run'].get('functrain', '?')}. Load "
                "it with that version."
            )
        body["values"] = {n: float(x) for n, x in decode(body["values"], {}).items()}
        if not all(isinstance(record["spec"], str) for record in body["leaves"].values()):
            raise TypeError("leaves of another kind")
        kinds = {"trees": list, "leaves": dict, "files": list, "run": dict, "documents": dict}
        for name, kind in kinds.items():
            if not isinstance(body[name], kind):
                raise TypeError(f"{name} of another kind")
    return body


@contextlib.contextmanager
def understood(what: str) -> Iterator[None]:
    """Makes a CheckpointCorruptError of whatever reading a text that makes no sense raises."""
    try:
        yield
    except (
        *(ArithmeticError, AttributeError, ImportError, LookupError, OSError),
        *(RecursionError, TypeError, ValueError),
    ) as error:
        if isinstance(error, CheckpointMismatchError):
            raise
        got = error.strerror if isinstance(error, OSError) else str(error)[:200]
        raise CheckpointCorruptError(
            f"{what}, got what cannot be read: {got}. It is damaged: take another checkpoint."
        ) from error


def open_plain(path: str) -> io.FileIO:
    """Opens a file for reading; raises OSError for links, which may lead elsewhere, and pipes."""
    flags = os.O_RDONLY | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0)
    handle = os.open(path, flags | getattr(os, "O_BINARY", 0))
    if not stat.S_ISREG(os.fstat(handle).st_mode):
        os.close(handle)
        raise OSError(0, "not a plain file", path)
    return open(handle, "rb", buffering=0)


def is_checkpoint(directory: str) -> bool:
    """Returns True if a directory is a checkpoint, damaged or not."""
    if os.path.islink(directory):
        return False
    return any(os.path.lexists(os.path.join(directory, x)) for x in (MANIFEST, arrays_name(0)))


def arrays_name(process: int) -> str:
    """Returns the name of the file with the arrays of a process."""
    return f"arrays-{process:d}.safetensors"


def is_step(name: str) -> bool:
    """Returns True if a name is that of a step's checkpoint: twelve digits."""
    return len(name) == 12 and name.isascii() and name.isdigit()


def kind_of(path: str) -> str:
    """Names what stands at a path, for error messages."""
    if not os.path.isdir(path):
        return "a file" if os.path.lexists(path) else "nothing"
    if is_checkpoint(path):
        return "a checkpoint"
    steps = sorted(name for name in os.listdir(path) if is_step(name))
    if steps:
        return f"a directory of checkpoints, the last of which is {steps[-1]}"
    return "something else"


def parse_spec(spec: str) -> tuple[np.dtype[Any], tuple[int, ...]]:
    """Returns dtype and shape of a spec, such as ``float32[8, 3]``; else ValueError, TypeError."""
    match = re.fullmatch(r"([<>]?\w+)\[((?:\d+(?:, \d+)*)?)\]", spec)
    if match is None or (dtype := jnp.dtype(match[1])).hasobject:
        raise ValueError(f"expected a spec such as float32[8, 3], got {spec[:100]!r}")
    return dtype, tuple(int(n) for n in match[2].split(", ") if n)


def _json(value: Any, **how: Any) -> str:
    return json.dumps(value, allow_nan=False, default=lambda number: number.item(), **how)


def _digest(body: Any) -> str:
    return f"{zlib.crc32(_json(body, sort_keys=True).encode()):08x}"


# What equal bits depend on, apart from the program.


def fingerprint(state: PyTree) -> dict[str, Any]:
    """Returns versions, devices and cores of this process, and the meshes of a state."""
    device, cores = jax.devices()[0], getattr(os, "sched_getaffinity", None)
    shardings = (getattr(leaf, "sharding", None) for leaf in jax.tree.leaves(state))
    meshes = {str(dict(s.mesh.shape)) for s in shardings if isinstance(s, jax.NamedSharding)}
    return {
        "functrain": __version__,
        "jax": jax.__version__,
        "jaxlib": metadata.version("jaxlib"),
        "python": platform.python_version(),
        "platform": device.platform,
        "device": device.device_kind,
        "devices": jax.device_count(),
        "processes": jax.process_count(),
        "mesh": sorted(meshes),
        "cores": len(cores(0)) if cores is not None else os.cpu_count(),
    }


def differences(saved: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """Names what differs between two fingerprints and may change results."""
    return [
        f"{name}: saved with {saved.get(name)}, now {now.get(name)}"
        for name in {**saved, **now}
        if name not in ("functrain", "python") and saved.get(name) != now.get(name)
    ]


# Documents: what `state()` of a hook or a loader returns.


def encode(value: Any, name: str, arrays: dict[str, Any]) -> Any:
    """Returns a document as JSON has it; its arrays are put into `arrays`, under names.

    Args:
      value: Dicts, lists and tuples of numbers, texts, bytes, None and arrays.
      name: Of the document: in front of the names of its arrays, and for errors.
      arrays: Gets them.

    Raises:
      TypeError: It holds anything else.

    Examples:
      >>> arrays = {}
      >>> encode({"best": 0.5, "weights": [np.ones(2)], "worst": np.inf}, "hook", arrays)
      {'best': 0.5, 'weights': [{'$array': 'hook/weights/0'}], 'worst': {'$float': 'inf'}}
      >>> arrays
      {'hook/weights/0': array([1., 1.])}
    """
    if isinstance(value, np.generic) and value.dtype.kind in "biuf":
        value = value.item()
    if isinstance(value, float) and not math.isfinite(value):
        return {"$float": str(value)}
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, bytes):
        return {"$bytes": base64.b64encode(value).decode()}
    if isinstance(value, Mapping):
        if all(isinstance(key, str) and not key.startswith("$") for key in value):
            return {key: encode(x, f"{name}/{key}", arrays) for key, x in value.items()}
        pairs = [
            [encode(k, name, arrays), encode(x, f"{name}/{k}", arrays)] for k, x in value.items()
        ]
        return {"$items": pairs}
    if isinstance(value, list | tuple):
        items = [encode(x, f"{name}/{i}", arrays) for i, x in enumerate(value)]
        return items if isinstance(value, list) else {"$tuple": items}
    if isinstance(value, np.ndarray | jax.Array):
        while name in arrays:  # {"a/b": x, "a": {"b": y}}, {1: x, "1": y}
            name += "'"
        arrays[name] = value
        key = {"$key": str(jax.random.key_impl(value))} if _tree.is_key(value) else {}
        return {"$array": name, **key}
    if hasattr(value, "numpy") and type(value).__module__ == "torch":
        return {"$tensor": encode(value.numpy(), name, arrays)}
    raise TypeError(
        f"{name}: expected dicts, lists and tuples of numbers, texts and arrays, got "
        f"{type(value).__name__}. Nothing else can be saved without running code when it is loaded."
    )


def decode(document: Any, arrays: Mapping[str, np.ndarray]) -> Any:
    """Returns what `encode` was given; arrays are NumPy's, numbers Python's."""
    if isinstance(document, list):
        return [decode(x, arrays) for x in document]
    if not isinstance(document, dict):
        return document
    match document:
        case {"$float": text}:
            return float(text)
        case {"$bytes": text}:
            return base64.b64decode(text)
        case {"$tuple": items}:
            return tuple(decode(x, arrays) for x in items)
        case {"$items": pairs}:
            return {decode(k, arrays): decode(x, arrays) for k, x in pairs}
        case {"$array": name, "$key": kind}:
            return jax.random.wrap_key_data(jnp.asarray(arrays[name]), impl=kind)
        case {"$array": name}:
            return arrays[name]
        case {"$tensor": inner}:
            torch = import_optional("torch", "expected no tensors, which need: pip install torch")
            return torch.from_numpy(decode(inner, arrays))
    return {key: decode(x, arrays) for key, x in document.items()}
