"""Calls of modules as ``module(inputs)``: their arguments, and the state that they leave."""

from collections.abc import Collection, Mapping
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
    names = parameters(module)
    return {name: training == value for name, value in SWITCHES.items() if name in names}


def require_one_input(module: Any, base: str, mode: Collection[str], advice: str = "") -> None:
    """Raises TypeError unless a module can be called as ``module(inputs, **mode)``.

    Args:
      module: The module.
      base: The class of its library's modules, as code, such as ``nn.Module``.
      mode: The names of the arguments that are passed besides the inputs.
      advice: What else may be done.
    """
    name = _repr.name(module)
    if not callable(module):
        raise TypeError(
            f"module: expected a module with a method __call__(self, inputs), got {name}, which "
            "has none. Write one that calls the method that you want."
        )
    if accepts(module, 1, *mode):
        return
    arguments = []
    for argument, parameter in parameters(module).items():
        is_required = parameter.default is parameter.empty
        if argument in mode:
            arguments.append(f"{argument}={argument}")
        elif is_required and parameter.kind is parameter.KEYWORD_ONLY:
            arguments.append(f'{argument}=inputs["{argument}"]')
        elif is_required and parameter.kind < parameter.KEYWORD_ONLY:
            arguments.append(f'inputs["{argument}"]')
    field = f"    net: {base}\n"
    if base == "nnx.Module":
        field = "    def __init__(self, net):\n        self.net = net\n"
    raise TypeError(
        "module: expected a module that is called as module(inputs), where inputs is one pytree, "
        f"got {name}({', '.join(parameters(module))}). {advice}Wrap it, "
        "and make the model of OneInput(module):\n\n"
        f"class OneInput({base}):\n{field}\n"
        f"    def __call__({', '.join(['self', 'inputs', *mode])}):\n"
        f"        return self.net({', '.join(arguments)})\n"
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
