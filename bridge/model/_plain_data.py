"""Conversion of flax modules, functions and arguments to plain data for Keras files, and back.

A linen module is a dataclass, so it is written as its class and the fields that differ from their
defaults. Reading imports nothing, since a file may come from anywhere. It can only refer to public
functions of a few namespaces, to linen modules in Python modules that the program has imported, and
to objects that were registered with Keras.
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
    """An encoder and decoder of plain data.

    Attributes:
      namespaces: The modules to whose public functions a file can refer.
      advice: The end of the message if a value cannot be written.
    """

    namespaces: tuple[str, ...]
    advice: str

    def encode(self, value: Any, name: str) -> Any:
        """Returns a value as plain data.

        Args:
          value: The value.
          name: The name of the value in messages.

        Raises:
          ValueError: The value, or a value inside it, cannot be written.
        """
        if value is None or isinstance(value, bool | int | float | str):
            return value
        if isinstance(value, nn.Module):
            cls = type(value)
            fields = {}
            for field in dataclasses.fields(value):
                if _differs_from_default(value, field):
                    fields[field.name] = getattr(value, field.name)
            path = f"{cls.__module__}:{cls.__qualname__}"
            return {"module": path, "fields": self.encode_arguments(fields, name)}
        if type(value) is list or type(value) is tuple:
            items = [self.encode(x, f"{name}[{i}]") for i, x in enumerate(value)]
            return {"tuple": items} if type(value) is tuple else items
        # As pairs, since the keys of a JSON object can only be strings.
        if isinstance(value, Mapping):
            pairs = [[key, self.encode(x, f"{name}[{key!r}]")] for key, x in value.items()]
            return {"items": pairs}
        if isinstance(value, jax.lax.Precision):
            return {"precision": value.name}
        is_scalar_type = isinstance(value, type) and issubclass(
            value, np.generic | int | float | complex
        )
        if is_scalar_type or isinstance(value, np.dtype | type(jnp.float32)):
            return {"dtype": jnp.dtype(value).name}
        if hasattr(value, "get_config") or isinstance(value, np.ndarray | np.generic | jax.Array):
            return keras.saving.serialize_keras_object(value)
        return {"function": self.name_of(value, name)}

    def encode_arguments(self, arguments: Mapping[str, Any], name: str) -> dict[str, Any]:
        """Returns keyword arguments as plain data; `name` is that of their function."""
        return {key: self.encode(x, f"{name}: {key!r}") for key, x in arguments.items()}

    def decode_arguments(self, arguments: Mapping[str, Any]) -> dict[str, Any]:
        """Returns the keyword arguments that `encode_arguments` encoded."""
        return dict(zip(arguments, map(self.decode, arguments.values()), strict=True))

    def decode(self, value: Any) -> Any:
        """Returns the value that `encode` encoded.

        Raises:
          ValueError: A class or function does not exist; the message says how to provide it.
        """
        if isinstance(value, list):
            return list(map(self.decode, value))
        if not isinstance(value, dict):
            return value
        match value:
            case {"module": path, "fields": fields}:
                return _module_class(path)(**self.decode_arguments(fields))
            case {"tuple": items}:
                return tuple(map(self.decode, items))
            case {"items": pairs}:
                return {key: self.decode(x) for key, x in pairs}
            case {"precision": name}:
                return jax.lax.Precision[name]
            case {"dtype": name}:
                return jnp.dtype(name).type
            case {"function": name}:
                return self.find_function(name)
            case {"class_name": _}:
                return keras.saving.deserialize_keras_object(value)
        raise ValueError(f"expected data that bridge wrote into a file, got {value}")

    def name_of(self, function: Any, name: str) -> str:
        """Returns the name with which `find_function` returns a function.

        Args:
          function: The function.
          name: The name of the value in messages.

        Raises:
          ValueError: The function is neither public in a namespace nor registered with Keras.
        """
        function_name = getattr(function, "__name__", None) or ""
        for namespace in self.namespaces:
            if getattr(sys.modules.get(namespace), function_name, None) is function:
                return f"{namespace}.{function_name}"
        registered: str = keras.saving.get_registered_name(function) if function_name else ""
        # Keras returns a name for every function, registered or not.
        if registered and keras.saving.get_registered_object(registered) is function:
            return registered
        label = getattr(function, "__qualname__", None) or f"a {type(function).__name__}"
        raise ValueError(f"{name}: {label} cannot be written to a file. {self.advice}")

    def find_function(self, name: str) -> Any:
        """Returns the function with a name that `name_of` returned.

        Raises:
          ValueError: There is no such function in the namespaces or among registered objects.
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


def _differs_from_default(module: nn.Module, field: Any) -> bool:
    """Returns True if a field of a linen module must be written to create the module again."""
    value, default = getattr(module, field.name), field.default
    if field.default_factory is not dataclasses.MISSING:
        default = field.default_factory()
    is_equal = type(value) is type(default) and bool(np.all(value == default))
    # flax sets `parent` to the enclosing module.
    return field.name != "parent" and field.init and not (value is default or is_equal)


def _module_class(path: str) -> Any:
    """Returns the class of linen modules with a path "python.module:Class".

    Raises:
      ValueError: There is no such class.
    """
    module, _, name = path.partition(":")
    cls = keras.saving.get_registered_object(name)
    if cls is None:
        # Only modules that the program has imported. An import would run the code of a module that
        # the file names.
        cls = sys.modules.get(module)
        for part in name.split("."):
            cls = getattr(cls, part, None)
    if not (isinstance(cls, type) and issubclass(cls, nn.Module)):
        raise ValueError(
            f"module: expected the class {name} of {module}, found none. Import {module} before "
            f"loading, or pass it: custom_objects={{{name!r}: {name.rpartition('.')[2]}}}."
        )
    return cls
