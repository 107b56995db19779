"""Flax modules written down as plain data, for Keras's files, and read again.

A linen module is a dataclass: its class and the fields that differ from their defaults. Nothing is
imported on reading: a file may only name classes of flax, those of modules that the program has
imported, and what was registered with Keras.
"""

import dataclasses
import sys
from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import keras
import numpy as np

# Where functions are looked for, by their public names.
_NAMESPACES = ("flax.linen", "flax.linen.initializers", "jax.nn", "jax.numpy", "jax.lax")


def encode(source: Any) -> dict[str, Any]:
    """Returns a module, or a function that makes one, as plain data.

    Raises:
      ValueError: It cannot be written down; the message says what can.
    """
    if isinstance(source, nn.Module):
        return _module(source, type(source).__name__)
    if not _is_registered(source):
        raise ValueError(
            f"the layer's module, {_label(source)}, cannot be written down. {_WAY_OUT}"
        )
    return {"function": keras.saving.get_registered_name(source)}


_WAY_OUT = (
    "Make the layer of a function that makes the module, registered with Keras:\n"
    "  @keras.saving.register_keras_serializable()\n"
    "  def make_net():\n"
    "      return Net(...)\n"
    "  layer = bridge.from_flax(make_net)\n"
    "Or save weights only: model.save_weights('x.weights.h5')."
)


def _module(module: nn.Module, where: str) -> dict[str, Any]:
    fields = {}
    for field in dataclasses.fields(module):
        value = getattr(module, field.name)
        if field.name == "parent" or not field.init or _is_default(value, field):
            continue
        fields[field.name] = _encode(value, f"{where}.{field.name}")
    cls = type(module)
    return {"module": f"{cls.__module__}:{cls.__qualname__}", "fields": fields}


def _is_default(value: Any, field: Any) -> bool:
    default = field.default
    if field.default_factory is not dataclasses.MISSING:
        default = field.default_factory()
    return value is default or (type(value) is type(default) and bool(np.all(value == default)))


def _encode(value: Any, where: str) -> Any:
    match value:
        case None | bool() | int() | float() | str():
            return value
        case nn.Module():
            return _module(value, where)
        case tuple():
            return {"tuple": [_encode(x, f"{where}[{i}]") for i, x in enumerate(value)]}
        case list():
            return [_encode(x, f"{where}[{i}]") for i, x in enumerate(value)]
        case dict() | nn.FrozenDict() if all(isinstance(key, str) for key in value):
            return {"dict": {key: _encode(x, f"{where}[{key!r}]") for key, x in value.items()}}
        case keras.Layer():
            return {"keras": keras.saving.serialize_keras_object(value)}
        case jax.lax.Precision():
            return {"precision": value.name}
    scalar = isinstance(value, type) and issubclass(value, np.generic)
    if scalar or isinstance(value, (np.dtype, type(jnp.float32))):  # any way to write a dtype
        return {"dtype": jnp.dtype(value).name}
    if (name := _public_name(value)) is not None:
        return {"public": name}
    if _is_registered(value):
        return {"function": keras.saving.get_registered_name(value)}
    raise ValueError(f"{where}: {_label(value)} cannot be written down. {_WAY_OUT}")


def decode(value: Any) -> Any:
    """Returns the module, or the function, that `encode` wrote down.

    Raises:
      ValueError: A class or function is not there; the message says how to provide it.
    """
    if isinstance(value, list | tuple):
        return [decode(x) for x in value]
    if not isinstance(value, dict):
        return value
    if "module" in value:
        fields = {name: decode(x) for name, x in value["fields"].items()}
        return _class(value["module"])(**fields)
    ((kind, content),) = value.items()
    if kind not in _DECODERS:
        raise ValueError(f"module: expected what a FlaxLayer wrote, got {value}")
    return _DECODERS[kind](content)


def _public_name(value: Any) -> str | None:
    name = getattr(value, "__name__", None) or ""
    found = (n for n in _NAMESPACES if getattr(sys.modules.get(n), name, None) is value)
    return next((f"{namespace}.{name}" for namespace in found), None)


def _public(path: str) -> Any:
    namespace, _, name = path.rpartition(".")
    if namespace not in _NAMESPACES or not hasattr(sys.modules.get(namespace), name):
        raise ValueError(f"module: expected a public function of jax or flax, got {path}")
    return getattr(sys.modules[namespace], name)


def _class(path: str) -> Any:
    module, _, name = path.partition(":")
    found = keras.saving.get_registered_object(name)
    if found is None:
        found = sys.modules.get(module)
        for part in name.split("."):
            found = getattr(found, part, None)
    if not (isinstance(found, type) and issubclass(found, nn.Module)):
        raise ValueError(
            f"module: expected the class {name} of {module}, found none. Import {module} before "
            f"loading, or pass it: custom_objects={{{name!r}: {name.rpartition('.')[2]}}}."
        )
    return found


def _is_registered(value: Any) -> bool:
    if not callable(value) or not hasattr(value, "__name__"):
        return False
    name = keras.saving.get_registered_name(value)
    return keras.saving.get_registered_object(name) is value


def _registered(name: str) -> Any:
    found = keras.saving.get_registered_object(name)
    if found is None:
        raise ValueError(
            f"module: expected the function registered as {name!r}, found none. Import the module "
            "which registers it before loading, or pass it: "
            f"custom_objects={{{name!r}: ...}}."
        )
    return found


_DECODERS: dict[str, Callable[[Any], Any]] = {
    "tuple": lambda content: tuple(decode(x) for x in content),
    "dict": lambda content: {key: decode(x) for key, x in content.items()},
    "keras": keras.saving.deserialize_keras_object,
    "precision": lambda content: jax.lax.Precision[content],
    "dtype": lambda content: jnp.dtype(content).type,
    "public": _public,
    "function": _registered,
}


def _label(value: Any) -> str:
    return getattr(value, "__qualname__", None) or f"a {type(value).__name__}"
