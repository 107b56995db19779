"""Conversion of functions of optax and their arguments to plain data for Keras files, and back.

Reading imports nothing, since a file may come from anywhere. It can only refer to public functions
of optax, and to objects that were registered with Keras.
"""

import sys
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import keras
import numpy as np

_NAMESPACES = ("optax", "optax.contrib")


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


def name_of(function: Any, name: str) -> str:
    """Returns the name with which `find_function` returns a function.

    Args:
      function: The function.
      name: The name of the value in messages.

    Raises:
      ValueError: The function is neither one of optax nor registered with Keras.
    """
    function_name = getattr(function, "__name__", None) or ""
    for namespace in _NAMESPACES:
        if getattr(sys.modules.get(namespace), function_name, None) is function:
            return f"{namespace}.{function_name}"
    registered: str = keras.saving.get_registered_name(function) if function_name else ""
    # Keras returns a name for every function, registered or not.
    if registered and keras.saving.get_registered_object(registered) is function:
        return registered
    label = getattr(function, "__qualname__", None) or f"a {type(function).__name__}"
    raise ValueError(
        f"{name}: {label} cannot be written to a file. Pass the function that creates it and its "
        "arguments, as in bridge.OptaxOptimizer(optax.adam, learning_rate=1e-3), decorate it with "
        "@keras.saving.register_keras_serializable(), or save weights alone: save_weights."
    )


def find_function(name: str) -> Any:
    """Returns the function with a name that `name_of` returned.

    Raises:
      ValueError: There is no such function in optax or among registered objects.
    """
    function = keras.saving.get_registered_object(name)
    namespace, _, last = name.rpartition(".")
    if function is None and namespace in _NAMESPACES and not last.startswith("_"):
        function = getattr(sys.modules.get(namespace), last, None)
    if not callable(function):
        raise ValueError(
            f"expected a public function of optax, or one that is registered with Keras, got "
            f"{name!r}. Import the module that registers it before loading, or pass it: "
            f"custom_objects={{{name!r}: ...}}."
        )
    return function
