"""Modules as models: how they are called, and the state that they leave."""

from collections.abc import Collection, Mapping
from typing import Any

import jax

from functrain.common._arguments import accepts, describe_signature, parameters
from functrain.common._types import PyTree
from functrain.model._freeze import FrozenState

# Flax and its users have several names for the same argument. Each name maps to its value in
# training; its value otherwise is the opposite.
SWITCHES = {"training": True, "train": True, "deterministic": False, "use_running_average": False}


def switches(module: Any, training: bool) -> dict[str, Any]:
    """Returns the values of the switches that the module's ``__call__`` takes, by name."""
    names = parameters(module)
    return {name: training == value for name, value in SWITCHES.items() if name in names}


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


def require_unwrapped(model_state: PyTree) -> None:
    """Raises ValueError for the model_state of a model of `freeze` or `lora`."""
    if isinstance(model_state, FrozenState):
        raise ValueError(
            "model_state: expected that of this model, got that of the model which "
            "functrain.freeze or functrain.lora returned. Use that model, as in "
            "supervised(freeze(model, ...), loss), or the state of functrain.merge_frozen(state) "
            "or functrain.merge_lora(state)."
        )


def restrict_to(reference: PyTree, tree: PyTree) -> PyTree:
    """Returns the entries of a nested mapping that `reference` has too, in its types.

    Entries that a call added are left out: the structure of a state must not change.
    """
    if isinstance(reference, Mapping) and isinstance(tree, Mapping):
        kept = {
            name: restrict_to(below, tree.get(name, below)) for name, below in reference.items()
        }
        return type(reference)(kept)  # type: ignore[call-arg]  # of dict, or flax's FrozenDict
    # Without leaves `reference` may be () where nnx has {}, and stays as it is.
    return tree if jax.tree.leaves(reference) else reference
