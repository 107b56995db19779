"""Modules as models: how they are called, and the state that they leave."""

import inspect
from collections.abc import Callable, Collection, Mapping
from typing import Any

import jax

from functrain.common._arguments import accepts, describe_signature, parameters
from functrain.common._checks import require
from functrain.common._types import PyTree
from functrain.common._warnings import warn
from functrain.model._freeze import FrozenState

# Flax and its users have several names for the same argument. Each name maps to its value in
# training; its value otherwise is the opposite.
SWITCHES = {"training": True, "train": True, "deterministic": False, "use_running_average": False}


def switches(module: Any, training: bool) -> dict[str, Any]:
    """Returns the values of the switches that the module's ``__call__`` takes, by name."""
    names = parameters(module)
    return {name: training == value for name, value in SWITCHES.items() if name in names}


def warn_of_other_switch(module: Any, training: bool, trains: Callable[..., bool]) -> None:
    """Warns of a module that is in the wrong mode, since its switch has another name.

    Args:
      module: The module.
      training: True in training.
      trains: Given arguments of the module by name, returns True if it then drops values or
        updates its state.
    """
    flags = _other_flags(module)
    if not flags or trains() == training:
        return
    for name, value in flags.items():
        if trains(**{name: value}) == training:
            passed = f"{name}={'train' if value == training else 'not train'}"
            modes = ("training", "evaluation") if training else ("evaluation", "training")
            warn(
                f"module: expected an argument of __call__ named {', '.join(SWITCHES)}, got "
                f"{describe_signature(module)}. In {modes[0]}, its dropout and batch statistics "
                f"stay in {modes[1]} mode, which {name}={value} would change. Rename the argument, "
                "or wrap the module in one whose __call__(self, inputs, train) calls it with "
                f"{passed}."
            )


def _other_flags(module: Any) -> dict[str, bool]:
    """Returns the flags of a module without a known switch, by name, opposite to their defaults."""
    arguments = parameters(module)
    if SWITCHES.keys() & arguments.keys():
        return {}
    flags = {
        name: not x.default
        for name, x in arguments.items()
        if isinstance(x.default, bool) or (x.default is None and "bool" in str(x.annotation))
    }
    takes_any = any(x.kind is inspect.Parameter.VAR_KEYWORD for x in arguments.values())
    return {**flags, **SWITCHES} if takes_any else flags


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
