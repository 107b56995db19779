"""Calls of modules as ``module(inputs)``: their arguments, and the state that they leave."""

from collections.abc import Collection
from typing import Any

import jax

from functrain.common import _repr
from functrain.common._arguments import accepts, parameters
from functrain.common._types import PyTree

# Flax and its users have several names for the same argument. Each name maps to its value in
# training; its value otherwise is the opposite.
SWITCHES = {"training": True, "train": True, "deterministic": False, "use_running_average": False}


def switches(module: Any, training: bool) -> dict[str, Any]:
    """Returns the values of the switches that the module's ``__call__`` takes, by name."""
    names = parameters(module.__call__)
    return {name: training == value for name, value in SWITCHES.items() if name in names}


def require_one_input(module: Any, base: str, mode: Collection[str], advice: str = "") -> None:
    """Raises TypeError unless a module can be called as ``module(inputs, **mode)``.

    Args:
      module: The module.
      base: The class of its library's modules, as code, such as ``nn.Module``.
      mode: The names of the arguments that are passed besides the inputs.
      advice: What else may be done.
    """
    if accepts(module.__call__, 1, *mode):
        return
    arguments = []
    for name, parameter in parameters(module.__call__).items():
        if name in mode:
            arguments.append(f"{name}={name}")
        elif parameter.kind is parameter.KEYWORD_ONLY and parameter.default is parameter.empty:
            arguments.append(f'{name}=inputs["{name}"]')
        elif parameter.default is parameter.empty and parameter.kind < parameter.KEYWORD_ONLY:
            arguments.append(f'inputs["{name}"]')
    field = f"    net: {base}\n"
    if base == "nnx.Module":
        field = "    def __init__(self, net):\n        self.net = net\n"
    raise TypeError(
        "module: expected a module that is called as module(inputs), where inputs is one pytree, "
        f"got {_repr.name(module)}({', '.join(parameters(module.__call__))}). {advice}Wrap it, "
        "and make the model of OneInput(module):\n\n"
        f"class OneInput({base}):\n{field}\n"
        f"    def __call__({', '.join(['self', 'inputs', *mode])}):\n"
        f"        return self.net({', '.join(arguments)})\n"
    )


def restrict_to(reference: PyTree, tree: PyTree) -> PyTree:
    """Returns the entries of a nested dict that `reference` has too.

    Entries that a call added are left out: the structure of a state must not change.
    """
    if isinstance(reference, dict) and isinstance(tree, dict):
        return {
            name: restrict_to(below, tree.get(name, below)) for name, below in reference.items()
        }
    # Without leaves `reference` may be () where nnx has {}, and stays as it is.
    return tree if jax.tree.leaves(reference) else reference
