"""Short texts for large objects: the reprs of states, results, loaders and hooks."""

import math
from typing import Any

import jax

from functrain.common import _tree
from functrain.common._types import PyTree

_LONGEST = 80  # characters of a container without arrays


def call(instance: Any, /, **parts: Any) -> str:
    """Returns ``Name(part=..., ...)`` for an instance, each part formatted by `brief`.

    Examples:
      >>> import numpy as np
      >>> call("text", of=3, params={"w": np.ones((30, 40)), "b": np.ones(40)})
      'str(of=3, params=1,240 in 2 arrays)'
    """
    arguments = [f"{name}={brief(part)}" for name, part in parts.items()]
    return f"{type(instance).__name__}({', '.join(arguments)})"


def brief(value: Any) -> str:
    """Returns a short description of a value. It waits for no device and shows no addresses."""
    if _tree.is_array(value):
        return f"{_tree.spec(value)} (deleted)" if _tree.is_deleted(value) else _tree.spec(value)
    if not jax.tree_util.all_leaves([value]):
        return _brief_tree(value)
    text = repr(value)
    # The default repr holds the address, which differs from run to run.
    return name(value) if " at 0x" in text else text


def state_repr(tree: PyTree) -> str:
    """Returns the repr of functrain's own states, which is short, or `brief` of another pytree."""
    is_ours = type(tree).__module__.partition(".")[0] in ("functrain", "bridge")
    return repr(tree) if is_ours else brief(tree)


def name(value: Any) -> str:
    """Returns the name of a function, or the class name of any other value."""
    return str(getattr(value, "__name__", type(value).__name__))


def format_bytes(count: float) -> str:
    """Returns a number of bytes in a unit that keeps it below 1024.

    Examples:
      >>> format_bytes(1000), format_bytes(3_000_000)
      ('1000 B', '2.9 MiB')
    """
    if count < 1024:
        return f"{count:.0f} B"
    for unit in ("KiB", "MiB", "GiB", "TiB"):
        count /= 1024
        if count < 1024 or unit == "TiB":
            break
    return f"{count:.1f} {unit}"


def shorten_start(text: str, width: int) -> str:
    """Returns a text, such as a path, cut at its start if it is longer than `width`.

    Examples:
      >>> shorten_start("params/encoder/layer_0/kernel", 20)
      '...er/layer_0/kernel'
    """
    return text if len(text) <= width else f"...{text[len(text) - width + 3 :]}"


def _brief_tree(tree: PyTree) -> str:
    """Returns how many numbers and arrays a tree holds, or its repr if it has no arrays."""
    arrays = list(filter(_tree.is_array, jax.tree.leaves(tree)))
    if not arrays:
        text = repr(tree)
        return text if len(text) <= _LONGEST and " at 0x" not in text else type(tree).__name__
    count = sum(math.prod(x.shape) for x in arrays)
    text = f"{count:,} in 1 array" if len(arrays) == 1 else f"{count:,} in {len(arrays):,} arrays"
    # Donated to a program: it can happen to a state that the caller still refers to.
    return f"{text} (deleted)" if any(map(_tree.is_deleted, arrays)) else text
