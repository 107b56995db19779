"""What an optimizer remembers, and to which parameter each part of it belongs."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import keras

from bridge import keras_private
from bridge.model._names import Path
from functrain.internal import PyTree
from functrain.internal import tree as _tree


class Role(NamedTuple):
    """What a variable of a Keras optimizer, or a leaf of an optax state, is for.

    Attributes:
      name: Of a slot ("momentums", "0/mu") or of a scalar ("iterations", "0/count").
      owner: The number of the parameter that a slot belongs to; None for a scalar.
    """

    name: str
    owner: int | None = None


class KerasOptState(NamedTuple):
    """The state of a `bridge.optimizer`.

    Attributes:
      scalars: "iterations" `i32[]`, "learning_rate" `f32[]` unless it is a schedule, and what
        else an optimizer counts, such as "dynamic_scale" of a LossScaleOptimizer. Another value
        for "learning_rate" is used from the next update on.
      slots: By name ("momentums", "velocities", ...), trees that are shaped like the params, with
        `optax.MaskedNode()` for those that have none.
      constraints: `ConstraintState()` where updates end within the constraints of a model.
    """

    scalars: dict[str, jax.Array]
    slots: dict[str, PyTree]
    constraints: Any = None


def roles_of_variables(optimizer: Any, params: Sequence[Any]) -> list[Role]:
    """Returns the role of each of `optimizer.variables`.

    Keras finds a parameter's slot by its place in a list, and every list of that length is one of
    slots: its attribute's name, without underscores in front, is the slot's.

    Args:
      optimizer: A built Keras optimizer.
      params: The variables it was built for, in the order that owners are to be counted in.

    Raises:
      KeyError: The optimizer was built for a variable that is not in `params`.
    """
    number = {id(v): i for i, v in enumerate(params)}
    roles: dict[int, Role] = {}
    for prefix, part in _parts(optimizer):
        owners = [number[id(v)] for v in keras_private.optimizers.trained_variables(part)]
        for name, slots in keras_private.optimizers.slot_lists(part):
            for owner, variable in zip(owners, slots, strict=True):
                if isinstance(variable, keras.Variable):
                    roles[id(variable)] = Role(name, owner)
        attributes = keras_private.optimizers.variable_attributes(part)
        for variable in part.variables:
            name = prefix + attributes.get(id(variable), variable.name)
            roles.setdefault(id(variable), Role(name))
    return [roles[id(v)] for v in optimizer.variables]


def _parts(optimizer: Any) -> Iterator[tuple[str, Any]]:
    """Yields the optimizers inside an optimizer, innermost first, with prefixes for scalars."""
    if isinstance(optimizer, keras.optimizers.LossScaleOptimizer):
        yield from _parts(optimizer.inner_optimizer)
        yield "loss_scale/", optimizer
    elif isinstance(optimizer, keras.optimizers.MultiOptimizer):
        for i, inner in enumerate(optimizer.optimizers):
            yield from ((f"{i}/{prefix}", part) for prefix, part in _parts(inner))
        yield "multi/", optimizer
    else:
        yield "", optimizer


def roles_of_leaves(opt_state: PyTree, params: Mapping[Path, int]) -> list[Role]:
    """Returns the role of each leaf of an optax state.

    Optax's states hold trees that are shaped like the params, so that the path of such a leaf ends
    with the path of its parameter.

    Args:
      opt_state: The state of a transformation that was given params as nested dicts.
      params: The paths of the params, with a number for each that does not depend on their keys.
    """
    leaves = jax.tree_util.tree_leaves_with_path(opt_state)
    return [_role(_tree.keys(path), params) for path, _ in leaves]


def _role(path: Path, params: Mapping[Path, int]) -> Role:
    for start in range(len(path)):
        if path[start:] in params:
            return Role("/".join(path[:start]), params[path[start:]])
    return Role("/".join(path))
