"""Arguments of functions of optax as plain data for Keras files, and back."""

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import keras
import numpy as np

from bridge.model._functions import find_function, name_of


def encode(value: Any, name: str) -> Any:
    """Returns a value as plain data.

    Args:
      value: The value.
      name: The name of the value in messages.

    Raises:
      ValueError: The value, or a value inside it, cannot be written.
    """
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if type(value) is list or type(value) is tuple:
        items = [encode(x, f"{name}[{i}]") for i, x in enumerate(value)]
        return {"tuple": items} if type(value) is tuple else items
    # As pairs, since the keys of a JSON object can only be strings.
    if isinstance(value, Mapping):
        return {"items": [[key, encode(x, f"{name}[{key!r}]")] for key, x in value.items()]}
    is_scalar_type = isinstance(value, type) and issubclass(value, np.generic)
    if is_scalar_type or isinstance(value, np.dtype | type(jnp.float32)):
        return {"dtype": jnp.dtype(value).name}
    if hasattr(value, "get_config") or isinstance(value, np.ndarray | np.generic | jax.Array):
        return keras.saving.serialize_keras_object(value)
    return {"function": name_of(value, name)}


def decode(value: Any) -> Any:
    """Returns the value that `encode` encoded.

    Raises:
      ValueError: A function does not exist; the message says how to provide it.
    """
    if isinstance(value, list):
        return list(map(decode, value))
    match value:
        case {"tuple": items}:
            return tuple(map(decode, items))
        case {"items": pairs}:
            return {key: decode(x) for key, x in pairs}
        case {"dtype": name}:
            return jnp.dtype(name).type
        case {"function": name}:
            return find_function(name)
        case {"class_name": _}:
            return keras.saving.deserialize_keras_object(value)
    return value
