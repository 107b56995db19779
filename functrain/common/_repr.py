"""Short texts for large things: what `repr` shows of states, results, loaders and hooks."""

import math
from typing import Any

import jax

from functrain.common import _tree
from functrain.common._types import PyTree

_LONGEST = 80  # characters of a container without arrays


def call(thing: Any, /, **parts: Any) -> str:
    """Returns ``Name(part=..., ...)`` of an object, each part as `brief` has it.

    Examples:
      >>> import numpy as np
      >>> call("text", of=3, params={"w": np.ones((30, 40)), "b": np.ones(40)})
      'str(of=3, params=1,240 in 2 arrays)'
    """
    return f"{type(thing).__name__}({', '.join(f'{n}={brief(x)}' for n, x in parts.items())})"


def brief(value: Any) -> str:
    """Returns what a value is, in a few words; it waits for no device, and shows no address."""
    if _tree.is_array(value):
        return _tree.spec(value) + " (deleted)" * _tree.is_deleted(value)
    if not jax.tree_util.all_leaves([value]):
        return _arrays(value)
    text = repr(value)
    return name(value) if " at 0x" in text else text


def state_repr(tree: PyTree) -> str:
    """Returns the repr of a state that has a short one, of any other pytree what `brief` has."""
    ours = type(tree).__module__.partition(".")[0] in ("functrain", "bridge")
    return repr(tree) if ours else brief(tree)


def name(thing: Any) -> str:
    """Returns the name of a function, or of the class of anything else."""
    return str(getattr(thing, "__name__", type(thing).__name__))


def class_with_article(thing: Any) -> str:
    """Returns the name of a thing's class with its article.

    Examples:
      >>> class_with_article(1), class_with_article("a")
      ('an int', 'a str')
    """
    name = type(thing).__name__
    return f"{'an' if name[0] in 'AEIOUaeiou' else 'a'} {name}"


def format_scalar(x: Any) -> str:
    """Returns the value of a scalar, or what it is where the value cannot be read."""
    return str(x) if _tree.is_readable(x) and not x.shape else brief(x)


def format_bytes(count: float) -> str:
    """Returns a number of bytes in the unit that suits it.

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
    """Returns a text, such as a path, without its beginning where it is too long.

    Examples:
      >>> shorten_start("params/encoder/layer_0/kernel", 20)
      '...er/layer_0/kernel'
    """
    return text if len(text) <= width else f"...{text[len(text) - width + 3 :]}"


def _arrays(tree: PyTree) -> str:
    arrays = [x for x in jax.tree.leaves(tree) if _tree.is_array(x)]
    if not arrays:
        text = repr(tree)
        return text if len(text) <= _LONGEST and " at 0x" not in text else type(tree).__name__
    count = sum(math.prod(x.shape) for x in arrays)
    gone = " (deleted)" if any(map(_tree.is_deleted, arrays)) else ""
    return f"{count:,} in {len(arrays):,} array{'s' if len(arrays) > 1 else ''}{gone}"
