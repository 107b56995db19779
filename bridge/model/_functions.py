"""Functions by the names that files of Keras have for them.

Reading imports nothing, since a file may come from anywhere. It can only refer to public functions
of optax, and to objects that were registered with Keras.
"""

import sys
from typing import Any

import keras

_NAMESPACES = ("optax", "optax.contrib")


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
        f"{name}: {label} cannot be written to a file. Pass the function that creates it: one of "
        "optax with its arguments, as in bridge.OptaxOptimizer(optax.adam, learning_rate=1e-3), or "
        "your own, decorated with @keras.saving.register_keras_serializable(). Or save the weights "
        "alone: model.save_weights."
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
