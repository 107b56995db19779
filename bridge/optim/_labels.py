"""Which leaf of an optax state belongs to which parameter, whatever the params' keys are."""

import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

import jax
import keras

from bridge.model import _names
from functrain.internal import PyTree
from functrain.internal import tree as _tree

Path: TypeAlias = tuple[str, ...]


class Label(NamedTuple):
    """What a leaf of an optax state is: `0/mu` of a parameter, or `0/count` of none."""

    prefix: Path
    owner: int | None


def labels(opt_state: PyTree, params: Mapping[Path, int]) -> list[Label]:
    """Returns a label for each leaf of a state.

    Optax's states hold trees that are shaped like the params, so that the path of such a leaf ends
    with the path of its parameter.

    Args:
      opt_state: The state of a transformation that was given params as nested dicts.
      params: The paths of the params, with a number for each that does not depend on their keys.
    """
    leaves = jax.tree_util.tree_leaves_with_path(opt_state)
    return [_label(_tree.keys(path), params) for path, _ in leaves]


def _label(path: Path, params: Mapping[Path, int]) -> Label:
    for start in range(len(path)):
        if path[start:] in params:
            return Label(path[:start], params[path[start:]])
    return Label(path, None)


def paths(variables: Sequence[Any]) -> list[Path]:
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
    classes = {_names.snake(cls) for cls in (keras.Variable, *_subclasses(keras.Layer))}
    renamed: dict[Path, Path] = {}
    return [_renamed(path, i, classes, renamed) for i, path in enumerate(split)]


def _renamed(path: Path, i: int, classes: set[str], renamed: dict[Path, Path]) -> Path:
    parent: Path = ()
    for depth, name in enumerate(path):
        last = depth == len(path) - 1
        known = (*path[: depth + 1], *((f"#{i}",) if last else ()))  # variables are never the same
        if known not in renamed:
            used = {path[-1] for path in renamed.values() if path[:-1] == parent}
            renamed[known] = (*parent, _names.free(_base(name, classes), used))
        parent = renamed[known]
    return parent


def _base(name: str, classes: set[str]) -> str:
    numbered = re.fullmatch(r"((?:forward_|backward_)?(.+))_\d+", name)  # as Bidirectional names
    return numbered[1] if numbered and numbered[2] in classes else name


def _subclasses(cls: type) -> set[type]:
    found: set[type] = set(cls.__subclasses__())
    return found.union(*map(_subclasses, found))
