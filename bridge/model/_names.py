"""What a variable is called: keys that read like the model, and are the same in every instance."""

import difflib
import itertools
import re
from collections.abc import Collection, Iterable, Iterator, Sequence
from typing import Any, TypeAlias

import keras

Path: TypeAlias = tuple[str, ...]


def keys(parent: Any, members: Iterable[Any]) -> list[str]:
    """Returns one key for each thing that a layer or metric holds, unique among them.

    Keras numbers unnamed layers over the whole process, so `dense` in one instance of a model is
    `dense_2` in the next. A key is therefore, in this order: the name somebody gave; else the
    public attribute that holds the member (`fc1`, `blocks_0`); else its class, in snake case.
    Members that would share a key get `_1`, `_2`, ... in Keras's order.

    Args:
      parent: A layer or a metric.
      members: Layers, variables, seed generators or metrics it holds, in Keras's order.

    Returns:
      A list of keys without `/`, one for each member.

    Examples:
      >>> import keras
      >>> layers = [keras.layers.Dense(1), keras.layers.Dense(1), keras.layers.Dense(1, name="out")]
      >>> keys(keras.Sequential(layers), layers)
      ['dense', 'dense_1', 'out']
    """
    held = dict(_held(parent))
    found: list[str] = []
    for member in members:
        found.append(free(_base(parent, member, held), found))
    return found


def _base(parent: Any, member: Any, held: dict[int, str]) -> str:
    kind = snake(type(member))
    # Bidirectional names its two layers after the one it was given, which may be unnamed.
    if re.fullmatch(rf"(forward_|backward_)?{kind}(_\d+)?", member.name):
        return held.get(id(member), kind)
    # `name=f"{self.name}_proj"` carries the parent's number into the child's name.
    owner = snake(type(parent))
    name = re.sub(rf"^{owner}_\d+_", f"{owner}_", member.name)
    return name.replace("/", ">")  # as Keras does in the paths of metric variables


def require_known(identifier: Any, module: Any, expected: str) -> None:
    """Refuses a name that a module such as `keras.losses` does not know, and what cannot be called.

    Raises:
      ValueError: There is no such name; the message has what is close.
      TypeError: The identifier is neither a name nor a function.
    """
    if callable(identifier):
        return
    if not isinstance(identifier, str):
        raise TypeError(f"{expected}, got {type(identifier).__name__}")
    try:
        module.get(identifier)
    except ValueError:
        close = difflib.get_close_matches(identifier, dir(module), n=3)
        hint = f" Did you mean {' or '.join(map(repr, close))}?" if close else ""
        raise ValueError(f"{expected}, got {identifier!r}.{hint}") from None


def free(name: str, used: Collection[str]) -> str:
    """Returns a name that is not used: itself, or with `_1`, `_2`, ... behind it.

    Examples:
      >>> free("dense", {"dense", "dense_1"})
      'dense_2'
    """
    numbered = (f"{name}_{i}" for i in itertools.count(1))
    return next(x for x in itertools.chain([name], numbered) if x not in used)


def snake(cls: type) -> str:
    """Returns the name Keras derives from a class; see keras/src/utils/naming.py."""
    name = re.sub(r"\W+", "", cls.__name__)
    name = re.sub("(.)([A-Z][a-z]+)", r"\1_\2", name)
    return re.sub("([a-z])([A-Z])", r"\1_\2", name).lower()


def _held(parent: Any) -> Iterator[tuple[int, str]]:
    """Yields the id of what public attributes hold, with a name; the first attribute comes last."""
    for attribute, value in reversed(vars(parent).items()):
        if not attribute.startswith("_"):
            yield from _named(attribute, value)


def _named(name: str, value: Any) -> Iterator[tuple[int, str]]:
    if isinstance(value, dict):
        for key, item in value.items():
            yield from _named(f"{name}_{key}".replace("/", ">"), item)
    elif isinstance(value, list | tuple):
        for i, item in enumerate(value):
            yield from _named(f"{name}_{i}", item)
    else:
        yield id(value), name


def variable_paths(variables: Sequence[Any]) -> list[Path]:
    """Returns unique paths for a model's variables that read like the model.

    A Keras optimizer sees the variables of a model, not the model. So these are made of
    `variable.path`: without the model's own name, and with the numbers that Keras gives to
    unnamed layers counted anew, in order, for each class (`dense_7` is `dense` again). They are
    those of `bridge.create_state` but for unnamed layers held by attributes, which go by the
    attribute's name there.
    """
    split = [tuple(v.path.split("/")) for v in variables]
    if len({path[0] for path in split}) == 1 and all(len(path) > 2 for path in split):
        split = [path[1:] for path in split]
    classes = {snake(cls) for cls in (keras.Variable, *_subclasses(keras.Layer))}
    renamed: dict[tuple[Any, ...], Path] = {(): ()}
    for number, path in enumerate(split):
        for depth, name in enumerate(path):
            is_layer = depth < len(path) - 1
            # Variables of one name are different ones, so that the number is part of what they are.
            level = path[: depth + 1] if is_layer else (*path, number)
            if level not in renamed:
                parent = renamed[path[:depth]]
                used = {new[-1] for new in renamed.values() if new and new[:-1] == parent}
                renamed[level] = (*parent, free(_unnumbered(name, classes), used))
    return [renamed[*path, number] for number, path in enumerate(split)]


def _unnumbered(name: str, classes: set[str]) -> str:
    numbered = re.fullmatch(r"((?:forward_|backward_)?(.+))_\d+", name)  # as Bidirectional names
    return numbered[1] if numbered and numbered[2] in classes else name


def _subclasses(cls: type) -> set[type]:
    found: set[type] = set(cls.__subclasses__())
    return found.union(*map(_subclasses, found))
