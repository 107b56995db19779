"""Stable names of variables, which are the same in every instance of a model."""

import difflib
import itertools
import re
from collections.abc import Collection, Iterable, Iterator, Sequence
from typing import Any, TypeAlias

import keras

Path: TypeAlias = tuple[str, ...]


def keys(parent: Any, members: Iterable[Any]) -> list[str]:
    """Returns unique keys for the members of a layer or metric.

    A key is the name that the user gave to the member; or else the public attribute that holds it
    (`fc1`, `blocks_0`); or else its class in snake case. Members with equal keys get `_1`, `_2`,
    ... in Keras's order.

    Args:
      parent: A layer or a metric.
      members: The layers, variables, seed generators or metrics that it holds, in Keras's order.

    Returns:
      A list of keys without `/`, one for each member.

    Examples:
      >>> import keras
      >>> layers = [keras.layers.Dense(1), keras.layers.Dense(1), keras.layers.Dense(1, name="out")]
      >>> keys(keras.Sequential(layers), layers)
      ['dense', 'dense_1', 'out']
    """
    attributes = dict(_attribute_names(parent))
    unique_keys: list[str] = []
    for member in members:
        unique_keys.append(free(_key(parent, member, attributes), unique_keys))
    return unique_keys


def _key(parent: Any, member: Any, attributes: dict[int, str]) -> str:
    # Keras numbers unnamed layers over the whole process, so that `dense` in one instance of a
    # model is `dense_2` in the next. Names derived from the class are therefore not used.
    class_name = snake(type(member))
    # Bidirectional names its two layers after the given layer, which may be unnamed.
    if re.fullmatch(rf"(forward_|backward_)?{class_name}(_\d+)?", member.name):
        return attributes.get(id(member), class_name)
    # `name=f"{self.name}_proj"` makes the parent's number a part of the child's name.
    parent_class = snake(type(parent))
    name = re.sub(rf"^{parent_class}_\d+_", f"{parent_class}_", member.name)
    # Keras makes the same replacement in the paths of metric variables.
    return name.replace("/", ">")


def require_known(identifier: Any, module: Any, expected: str) -> None:
    """Raises an error unless an identifier is callable, or a name in a module.

    Args:
      identifier: A name, or a callable, which is accepted without a further check.
      module: A module with a function `get`, such as `keras.losses`.
      expected: The beginning of the message: "name: expected ...".

    Raises:
      ValueError: The module does not know the name; the message suggests similar names.
      TypeError: The identifier is neither a name nor callable.
    """
    if callable(identifier):
        return
    if not isinstance(identifier, str):
        raise TypeError(f"{expected}, got {type(identifier).__name__}")
    try:
        module.get(identifier)
    except ValueError:
        similar_names = difflib.get_close_matches(identifier, dir(module), n=3)
        suggestion = " or ".join(map(repr, similar_names))
        hint = f" Did you mean {suggestion}?" if similar_names else ""
        raise ValueError(f"{expected}, got {identifier!r}.{hint}") from None


def free(name: str, used: Collection[str]) -> str:
    """Returns an unused name: the given one, or the first unused of `name_1`, `name_2`, ...

    Examples:
      >>> free("dense", {"dense", "dense_1"})
      'dense_2'
    """
    candidate = name
    for i in itertools.count(1):
        if candidate not in used:
            break
        candidate = f"{name}_{i}"
    return candidate


def snake(cls: type) -> str:
    """Returns the name that Keras derives from a class, as in keras/src/utils/naming.py."""
    name = re.sub(r"\W+", "", cls.__name__)
    name = re.sub("(.)([A-Z][a-z]+)", r"\1_\2", name)
    return re.sub("([a-z])([A-Z])", r"\1_\2", name).lower()


def _attribute_names(parent: Any) -> Iterator[tuple[int, str]]:
    """Yields the ids of the objects that public attributes hold, with their names."""
    # In reverse order: in a dict of these pairs the first attribute of an object then wins.
    for attribute, value in reversed(vars(parent).items()):
        if not attribute.startswith("_"):
            yield from _item_names(attribute, value)


def _item_names(name: str, value: Any) -> Iterator[tuple[int, str]]:
    """Yields the ids and names of the objects inside nested dicts and lists."""
    if isinstance(value, dict):
        for key, item in value.items():
            yield from _item_names(f"{name}_{key}".replace("/", ">"), item)
    elif isinstance(value, list | tuple):
        for i, item in enumerate(value):
            yield from _item_names(f"{name}_{i}", item)
    else:
        yield id(value), name


def variable_paths(variables: Sequence[Any]) -> list[Path]:
    """Returns stable and unique paths for the variables of a model.

    A path is `variable.path` without the model's name, and with new numbers for unnamed layers,
    counted for each class (`dense_7` becomes `dense`). These paths are those of
    `bridge.create_state`, except that there an unnamed layer in an attribute has the attribute's
    name.
    """
    # A Keras optimizer knows the variables of a model but not the model, so `keys` cannot be used.
    paths = [tuple(v.path.split("/")) for v in variables]
    roots = {path[0] for path in paths}
    if len(roots) == 1 and min(map(len, paths)) > 2:
        paths = [path[1:] for path in paths]
    class_names = set(map(snake, (keras.Variable, *_subclasses(keras.Layer))))
    # The new path of each level, starting with the root.
    renamed: dict[tuple[Any, ...], Path] = {(): ()}
    for index, path in enumerate(paths):
        for depth, name in enumerate(path):
            is_layer = depth < len(path) - 1
            # Two variables may have the same path, so that the index is part of the level.
            level = path[: depth + 1] if is_layer else (*path, index)
            if level not in renamed:
                parent = renamed[path[:depth]]
                used = {new[-1] for new in renamed.values() if new and new[:-1] == parent}
                renamed[level] = (*parent, free(_without_number(name, class_names), used))
    return [renamed[*path, index] for index, path in enumerate(paths)]


def _without_number(name: str, class_names: set[str]) -> str:
    """Returns a name without the number that Keras adds to names derived from a class."""
    # Bidirectional adds these prefixes to the names of its layers.
    match = re.fullmatch(r"((?:forward_|backward_)?(.+))_\d+", name)
    return match[1] if match and match[2] in class_names else name


def _subclasses(cls: type) -> set[type]:
    """Returns all direct and indirect subclasses of a class."""
    direct: set[type] = set(cls.__subclasses__())
    return direct.union(*map(_subclasses, direct))
