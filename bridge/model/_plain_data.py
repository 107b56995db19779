"""Flax modules, functions and their arguments as plain data, for Keras's files, and read again.

A linen module is a dataclass: its class and the fields that differ from their defaults. Nothing is
imported on reading: a file may only name public functions of a few namespaces, classes of flax and
of modules that the program has imported, and what was registered with Keras.
"""

import dataclasses
import sys
from collections.abc import Mapping
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import keras
import numpy as np


@dataclasses.dataclass(frozen=True)
class PlainData:
    """Writes values as plain data, and reads them.

    Attributes:
      namespaces: The modules whose public functions a file can name.
      advice: What to do where something cannot be written.
    """

    namespaces: tuple[str, ...]
    advice: str

    def encode(self, value: Any, where: str) -> Any:
        """Returns a value as plain data.

        Raises:
          ValueError: It cannot be written down; the message says where it is, and what can.
        """
        if value is None or isinstance(value, bool | int | float | str):
            return value
        if isinstance(value, nn.Module):
            cls = type(value)
            names = [f.name for f in dataclasses.fields(value) if _is_written(value, f)]
            fields = {name: getattr(value, name) for name in names}
            path = f"{cls.__module__}:{cls.__qualname__}"
            return {"module": path, "fields": self.encode_arguments(fields, where)}
        if type(value) is list or type(value) is tuple:
            items = [self.encode(x, f"{where}[{i}]") for i, x in enumerate(value)]
            return {"tuple": items} if type(value) is tuple else items
        if isinstance(value, Mapping):  # as pairs, since a file knows keys that are strings only
            return {
                "items": [[key, self.encode(x, f"{where}[{key!r}]")] for key, x in value.items()]
            }
        if isinstance(value, jax.lax.Precision):
            return {"precision": value.name}
        is_scalar_type = isinstance(value, type) and issubclass(
            value, np.generic | int | float | complex
        )
        if is_scalar_type or isinstance(value, np.dtype | type(jnp.float32)):
            return {"dtype": jnp.dtype(value).name}
        if hasattr(value, "get_config") or isinstance(value, np.ndarray | np.generic | jax.Array):
            return keras.saving.serialize_keras_object(value)
        return {"function": self.name_of(value, where)}

    def encode_arguments(self, arguments: Mapping[str, Any], where: str) -> dict[str, Any]:
        """Returns keyword arguments as plain data."""
        return {name: self.encode(x, f"{where}: {name!r}") for name, x in arguments.items()}

    def decode_arguments(self, arguments: Mapping[str, Any]) -> dict[str, Any]:
        """Returns what `encode_arguments` was given."""
        return {name: self.decode(x) for name, x in arguments.items()}

    def decode(self, value: Any) -> Any:
        """Returns the value that `encode` wrote down.

        Raises:
          ValueError: A class or function is not there; the message says how to provide it.
        """
        if isinstance(value, list):
            return [self.decode(x) for x in value]
        if not isinstance(value, dict):
            return value
        match value:
            case {"module": path, "fields": fields}:
                return _module_class(path)(**self.decode_arguments(fields))
            case {"tuple": items}:
                return tuple(self.decode(x) for x in items)
            case {"items": pairs}:
                return {key: self.decode(x) for key, x in pairs}
            case {"precision": name}:
                return jax.lax.Precision[name]
            case {"dtype": name}:
                return jnp.dtype(name).type
            case {"function": name}:
                return self.find(name)
            case {"class_name": _}:
                return keras.saving.deserialize_keras_object(value)
        raise ValueError(f"expected what bridge wrote into a file, got {value}")

    def name_of(self, function: Any, where: str) -> str:
        """Returns the name under which `find` finds a function.

        Raises:
          ValueError: It is neither public in one of the namespaces nor registered with Keras.
        """
        name = getattr(function, "__name__", None) or ""
        for namespace in self.namespaces:
            if getattr(sys.modules.get(namespace), name, None) is function:
                return f"{namespace}.{name}"
        registered: str = keras.saving.get_registered_name(function) if name else ""
        if registered and keras.saving.get_registered_object(registered) is function:
            return registered
        raise ValueError(self._refusal(function, where))

    def find(self, name: str) -> Any:
        """Returns the function that `name_of` named.

        Raises:
          ValueError: There is no such function, or none is registered under the name.
        """
        function = keras.saving.get_registered_object(name)
        namespace, _, last = name.rpartition(".")
        if function is None and namespace in self.namespaces and not last.startswith("_"):
            function = getattr(sys.modules.get(namespace), last, None)
        if not callable(function):
            raise ValueError(
                f"expected a public function of {', '.join(self.namespaces)}, or one that is "
                f"registered with Keras, got {name!r}. Import the module that registers it before "
                f"loading, or pass it: custom_objects={{{name!r}: ...}}."
            )
        return function

    def _refusal(self, value: Any, where: str) -> str:
        label = getattr(value, "__qualname__", None) or f"a {type(value).__name__}"
        return f"{where}: {label} cannot be written to a file. {self.advice}"


def _is_written(module: nn.Module, field: Any) -> bool:
    """Returns True for a field of a module that its class does not set by itself."""
    value, default = getattr(module, field.name), field.default
    if field.default_factory is not dataclasses.MISSING:
        default = field.default_factory()
    is_same = type(value) is type(default) and bool(np.all(value == default))
    return field.name != "parent" and field.init and not (value is default or is_same)


def _module_class(path: str) -> Any:
    """Returns a class of linen modules that is registered, or in a module that was imported."""
    module, _, name = path.partition(":")
    cls = keras.saving.get_registered_object(name)
    if cls is None:
        cls = sys.modules.get(module)
        for part in name.split("."):
            cls = getattr(cls, part, None)
    if not (isinstance(cls, type) and issubclass(cls, nn.Module)):
        raise ValueError(
            f"module: expected the class {name} of {module}, found none. Import {module} before "
            f"loading, or pass it: custom_objects={{{name!r}: {name.rpartition('.')[2]}}}."
        )
    return cls
