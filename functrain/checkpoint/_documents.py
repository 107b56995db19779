"""What goes with a state: nested numbers, texts and arrays, as JSON beside the arrays.

A document is what `state()` of a hook or a loader returns. Arrays in it are stored with the other
leaves, and named in the JSON. Nothing is pickled, and no class is looked up by a name in a file.
"""

import base64
import math
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from functrain.checkpoint._errors import CheckpointCorruptError
from functrain.common import _tree

DOCUMENTS = "documents"  # in front of the names of their arrays in a file


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
    """Returns what `encode` was given; arrays are NumPy's, numbers Python's.

    Raises:
      CheckpointCorruptError: Nothing is encoded like this.
    """
    try:
        return _decode(document, arrays)
    except (AttributeError, KeyError, RecursionError, TypeError, ValueError) as error:
        raise CheckpointCorruptError(
            f"expected a document of a checkpoint, got what cannot be read: {type(error).__name__} "
            f"{error}. It was edited: take another checkpoint."
        ) from error


def _decode(document: Any, arrays: Mapping[str, np.ndarray]) -> Any:
    if isinstance(document, list):
        return [_decode(x, arrays) for x in document]
    if not isinstance(document, dict):
        return document
    match document:
        case {"$float": text}:
            return float(text)
        case {"$bytes": text}:
            return base64.b64decode(text)
        case {"$tuple": items}:
            return tuple(_decode(x, arrays) for x in items)
        case {"$items": pairs}:
            return {_decode(k, arrays): _decode(x, arrays) for k, x in pairs}
        case {"$array": name, "$key": kind}:
            return jax.random.wrap_key_data(jnp.asarray(arrays[name]), impl=kind)
        case {"$array": name}:
            return arrays[name]
        case {"$tensor": inner}:
            return _tensor(_decode(inner, arrays).copy())
    return {key: _decode(x, arrays) for key, x in document.items()}


def _tensor(array: np.ndarray) -> Any:
    try:
        import torch
    except ImportError as error:
        raise CheckpointCorruptError(
            "expected a document without tensors, since PyTorch cannot be imported here, got a "
            f"tensor {array.dtype}{list(array.shape)}. To restore it: pip install torch."
        ) from error
    return torch.from_numpy(array)
