"""Functions by name, with arguments: what a saved file can say about an optax object."""

import inspect
from collections.abc import Callable, Mapping
from typing import Any

import jax.numpy as jnp
import keras
import numpy as np
import optax
import optax.contrib

_WAY_OUT = (
    "A function made inside another cannot be written to a file. Pass what makes it and its "
    "arguments, {owner}(optax.adam, learning_rate=1e-3); or put all of it into a function of "
    'yours with @keras.saving.register_keras_serializable("my_package") above it, and pass that: '
    "{owner}(my_function, my_argument=3)."
)


def require_takes(function: Any, expected: str, *args: Any, **arguments: Any) -> None:
    """Refuses a function that cannot be called so; says what was expected instead.

    Raises:
      TypeError: The arguments do not fit its signature.
    """
    try:
        inspect.signature(function).bind(*args, **arguments)
    except TypeError as error:
        raise TypeError(
            f"{expected}, got {function!r} with {sorted(arguments) or 'no arguments'}: {error}."
        ) from None
    except ValueError:
        return  # a function of another language may have no signature


def name_of(function: Callable[..., Any], owner: str, role: str) -> str:
    """Returns the name under which `named` finds a function.

    Args:
      function: One of optax's public functions, or one that is registered with Keras.
      owner: Who is to be saved, for the message.
      role: Which of its arguments this is, for the message.

    Raises:
      ValueError: It is neither.
    """
    name = getattr(function, "__name__", "")
    for module in (optax, optax.contrib):
        if getattr(module, name, None) is function:
            return f"{module.__name__}.{name}"
    registered: str = keras.saving.get_registered_name(function) if name else ""
    if registered and keras.saving.get_registered_object(registered) is function:
        return registered
    raise ValueError(
        f"{owner}: expected a {role} that a file can name, got {function!r}. "
        f"{_WAY_OUT.format(owner=owner)} Weights alone (save_weights) can be saved as it is."
    )


def named(name: str, custom_objects: Mapping[str, Any] | None = None) -> Callable[..., Any]:
    """Returns the function that `name_of` named.

    Raises:
      ValueError: optax has no such function, or none is registered under the name.
    """
    module, _, last = name.rpartition(".")
    places = {"optax": optax, "optax.contrib": optax.contrib}
    found: Callable[..., Any] | None = keras.saving.get_registered_object(
        name, custom_objects=custom_objects
    )
    if found is None and module in places and not last.startswith("_"):
        found = getattr(places[module], last, None)
    if not inspect.isfunction(found):
        raise ValueError(
            f"expected a function that optax has or that is registered with Keras, got {name!r}. "
            "Import the module that registers it before loading."
        )
    return found


def to_config(arguments: Mapping[str, Any], owner: str) -> dict[str, Any]:
    """Returns keyword arguments as plain data.

    Raises:
      ValueError: One of them is a function without a name.
    """
    return {key: _encoded(value, owner, key) for key, value in arguments.items()}


def from_config(
    config: Mapping[str, Any], custom_objects: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """Returns what `to_config` was given."""
    return {key: _decoded(value, custom_objects) for key, value in config.items()}


def _encoded(value: Any, owner: str, key: str) -> Any:
    if isinstance(value, optax.GradientTransformation):
        raise ValueError(
            f"{owner}: the argument {key!r} is an optax transformation, which holds functions. "
            + _WAY_OUT.format(owner=owner)
        )
    if isinstance(value, list | tuple):
        return [_encoded(item, owner, key) for item in value]
    if isinstance(value, Mapping):  # as pairs, since a file knows keys that are strings only
        return {"items": [_encoded(list(pair), owner, key) for pair in value.items()]}
    if isinstance(value, type | np.dtype) or type(value) is type(jnp.float32):
        return jnp.dtype(value).name
    if callable(value) and not hasattr(value, "get_config"):
        return {"function": name_of(value, owner, f"function for {key!r}")}
    return keras.saving.serialize_keras_object(value)


def _decoded(value: Any, custom_objects: Mapping[str, Any] | None) -> Any:
    if isinstance(value, list):
        return [_decoded(item, custom_objects) for item in value]
    if isinstance(value, dict) and set(value) == {"function"}:
        return named(value["function"], custom_objects)
    if isinstance(value, dict) and set(value) == {"items"}:
        return dict(_decoded(pair, custom_objects) for pair in value["items"])
    return keras.saving.deserialize_keras_object(value, custom_objects=custom_objects)
