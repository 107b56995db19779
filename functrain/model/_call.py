"""Modules as models: how they are called, and the state that they leave."""

from collections.abc import Collection, Mapping
from typing import Any

import jax

from functrain.common._arguments import accepts, describe_signature, parameters
from functrain.common._checks import require
from functrain.common._types import PyTree
from functrain.model._freeze import FrozenState

# Flax and its users have several names for the same argument. Each name maps to its value in
# training; its value otherwise is the opposite.
SWITCHES = {"training": True, "train": True, "deterministic": False, "use_running_average": False}


def switches(module: Any, training: bool) -> dict[str, Any]:
    """Returns the values of the switches that the module's ``__call__`` takes, by name."""
    names = parameters(module)
    return {name: training == value for name, value in SWITCHES.items() if name in names}


# The functions that take the modules of a package.
_CONVERTERS = {
    "flax.linen": "functrain.from_linen",
    "flax.nnx": "functrain.from_nnx",
    "equinox": "functrain.from_equinox",
    "keras": "bridge.from_keras",
}


def require_maker(module: Any, expected: str, own_package: str) -> None:
    """Raises TypeError unless an object may be a function that makes modules of a package.

    Modules of other packages are callable as well, but do not make any.
    """
    classes = () if isinstance(module, type) else type(module).__mro__
    converters = [
        converter
        for package, converter in _CONVERTERS.items()
        if package != own_package
        and any(f"{cls.__module__}.".startswith(f"{package}.") for cls in classes)
    ]
    if converters or not callable(module):
        advice = f" Use {converters[0]}." if converters else ""
        raise TypeError(f"module: expected {expected}, got {type(module).__name__}.{advice}")


def require_one_input(module: Any, mode: Collection[str], advice: str = "") -> None:
    """Raises TypeError unless a module can be called as ``module(inputs, **mode)``.

    Args:
      module: The module.
      mode: The names of the arguments that are passed besides the inputs.
      advice: What else may be done.
    """
    if not callable(module) or not accepts(module, 1, *mode):
        raise TypeError(
            "module: expected one that is called as module(inputs), where inputs is one pytree, "
            f"got {describe_signature(module)}. {advice}Wrap it in a module whose "
            f"__call__({', '.join(['self', 'inputs', *mode])}) calls it with the parts, as in "
            "self.net(inputs['x'], mask=inputs['mask'])."
        )


def require_own_state(model_state: PyTree) -> None:
    """Raises ValueError for a model_state of `freeze` or `lora`, which belongs to another model."""
    is_own = not isinstance(model_state, FrozenState)
    expected = "that of this model, not of one that freeze or lora returned"
    advice = "Use that model, or the state of merge_frozen(state)."
    require(is_own, "model_state", expected, model_state, advice)


def restrict_to(reference: PyTree, tree: PyTree) -> PyTree:
    """Returns the entries of a nested mapping that `reference` has too, in its types.

    Entries that a call added are left out: the structure of a state must not change.
    """
    if isinstance(reference, Mapping) and isinstance(tree, Mapping):
        entries = {
            name: restrict_to(below, tree.get(name, below)) for name, below in reference.items()
        }
        return type(reference)(entries)  # type: ignore[call-arg]  # of dict, or flax's FrozenDict
    # Without leaves `reference` may be () where nnx has {}, and stays as it is.
    return tree if jax.tree.leaves(reference) else reference
