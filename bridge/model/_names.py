"""Names of variables: those that the model shows."""

import itertools
import re
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator
from typing import Any, TypeAlias

Path: TypeAlias = tuple[str, ...]

_NUMBER = re.compile(r"_(\d+)(?=_|$)")
_NUMBER_AT_END = re.compile(r"_(\d+)$")


def keys(parent: Any, members: Iterable[Any]) -> list[str]:
    """Returns unique keys for the members of a layer or metric.

    A key is the name of the member, as `summary` shows it. A member that Keras named after its
    class has the name of the public attribute that holds it (`fc1`, `blocks_0`), if there is one.
    Members with equal keys get `_1`, `_2`, ... in Keras's order.

    Args:
      parent: A layer or a metric.
      members: The layers, variables, seed generators or metrics that it holds, in Keras's order.

    Returns:
      A list of keys without `/`, one for each member.

    Examples:
      >>> import keras
      >>> layers = [keras.layers.Dense(1, name=name) for name in ("dense_1", "dense_2", "out")]
      >>> keys(keras.Sequential(layers), layers)
      ['dense_1', 'dense_2', 'out']
    """
    attributes = dict(_attribute_names(parent))
    unique_keys: list[str] = []
    for member in members:
        unique_keys.append(unused_name(_key(member, attributes), unique_keys))
    return unique_keys


def _key(member: Any, attributes: dict[int, str]) -> str:
    # Bidirectional names its two layers after the given layer, which may be unnamed.
    is_named_by_keras = re.fullmatch(
        rf"(forward_|backward_)?{snake(type(member))}(_\d+)?", member.name
    )
    if is_named_by_keras and id(member) in attributes:
        return attributes[id(member)]
    # Keras makes the same replacement in the paths of metric variables.
    return str(member.name).replace("/", ">")


def unused_name(name: str, used: Collection[str]) -> str:
    """Returns an unused name: the given one, or the first unused of `name_1`, `name_2`, ...

    Examples:
      >>> unused_name("dense", {"dense", "dense_1"})
      'dense_2'
    """
    numbered = (f"{name}_{i}" for i in itertools.count(1))
    return next(key for key in itertools.chain([name], numbered) if key not in used)


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


def numbered_alike(paths: Iterable[Path]) -> dict[Path, Path]:
    """Returns the given paths by paths that are the same in every instance of an architecture.

    Keras numbers unnamed layers over the whole process, so that `dense` in one instance of a model
    is `dense_2` in the next. Names that differ only in their numbers are counted from zero here.

    Examples:
      >>> list(numbered_alike([("dense_7", "bias"), ("dense_10", "bias"), ("out", "bias")]))
      [('dense#0', 'bias#0'), ('dense#1', 'bias#0'), ('out#0', 'bias#0')]
    """
    paths = list(paths)
    families: dict[tuple[Path, str], set[str]] = defaultdict(set)
    for path in paths:
        for depth, name in enumerate(path):
            families[path[:depth], _NUMBER.sub("", name)].add(name)
    new_names: dict[Path, str] = {}
    for (parent, family), names in families.items():
        for i, name in enumerate(sorted(names, key=_numbers)):
            new_names[*parent, name] = f"{family}#{i}"
    return {
        tuple(new_names[path[: depth + 1]] for depth in range(len(path))): path for path in paths
    }


def stable_paths(paths: Iterable[Path], classes: Collection[str]) -> dict[Path, Path]:
    """Returns the given paths by paths without the numbers that Keras gives to unnamed layers.

    The name of such a layer begins with the name of its class. Here it is counted from the first
    of its class, beside the numbers of all of these.

    Args:
      paths: The paths of variables.
      classes: The names that Keras derives from the classes of layers.

    Examples:
      >>> paths = [("dense_7", "bias"), ("dense_8", "bias"), ("out_2", "bias")]
      >>> list(stable_paths(paths, ["dense"]))
      [('dense 0 of 0, 1', 'bias'), ('dense 1 of 0, 1', 'bias'), ('out_2', 'bias')]
    """
    paths = list(paths)
    numbers: dict[tuple[Path, str], set[int]] = defaultdict(set)
    for path in paths:
        for depth, name in enumerate(path):
            numbers[path[:depth], _NUMBER_AT_END.sub("", name)].add(_number_at_end(name))

    def stable_name(parent: Path, name: str) -> str:
        cls = _NUMBER_AT_END.sub("", name)
        if cls not in classes:
            return name
        first, *_ = members = sorted(numbers[parent, cls])
        # Other gaps, such as those of a user's own `dense_2`, do not tell which layer is which.
        places = ", ".join(str(number - first) for number in members)
        return f"{cls} {_number_at_end(name) - first} of {places}"

    return {tuple(stable_name(path[:i], x) for i, x in enumerate(path)): path for path in paths}


def _number_at_end(name: str) -> int:
    match = _NUMBER_AT_END.search(name)
    return int(match[1]) if match else 0


def _numbers(name: str) -> list[int]:
    return list(map(int, _NUMBER.findall(name)))
