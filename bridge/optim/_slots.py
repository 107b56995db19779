"""The roles of an optimizer's variables, and the parameters that its slots belong to."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import keras

from bridge import keras_private
from bridge.model._names import Path
from functrain.internal import PyTree
from functrain.internal import tree as _tree


class Role(NamedTuple):
    """The role of a variable of a Keras optimizer, or of a leaf of an optax state.

    Attributes:
      name: The name of a slot ("momentums", "0/mu") or of a scalar ("iterations", "0/count").
      owner: The index of the parameter that a slot belongs to; None for a scalar.
    """

    name: str
    owner: int | None = None


class KerasOptState(NamedTuple):
    """The state of a `bridge.optimizer`.

    Attributes:
      scalars: "iterations" `i32[]`, "learning_rate" `f32[]` unless it is a schedule, and other
        scalars, such as "dynamic_scale" of a LossScaleOptimizer. If you replace the value of
        "learning_rate", the next update uses the new one.
      slots: Trees with the structure of the params, by name ("momentums", "velocities", ...), with
        `optax.MaskedNode()` for params without such a slot.
      constraints: `ConstraintState()` if updates apply the constraints of a model.
      kind: The `kind_of` the optimizer, without leaves.
    """

    scalars: dict[str, jax.Array]
    slots: dict[str, PyTree]
    constraints: Any = None
    kind: Any = None


def kind_of(optimizer: Any) -> dict[str, tuple[()]]:
    """Returns the classes of a built optimizer and those inside it, as a pytree without leaves.

    In a state it is a part of the structure. Slots of different optimizers may have the same names.
    """
    names = [type(part).__name__ for _, part in keras_private.optimizers.nested(optimizer)]
    # AdamW's slots are those of Adam.
    return {"/".join("Adam" if name == "AdamW" else name for name in names): ()}


def roles_of_variables(optimizer: Any, params: Sequence[Any]) -> list[Role]:
    """Returns the role of each variable in `optimizer.variables`.

    A Keras optimizer keeps its slots in lists with one element for each parameter. The name of a
    slot is the name of the attribute that holds the list, without leading underscores.

    Args:
      optimizer: A built Keras optimizer.
      params: The variables that it was built for. `Role.owner` is an index into them.

    Raises:
      KeyError: The optimizer was built for a variable that is not in `params`.
    """
    index = dict(zip(map(id, params), range(len(params)), strict=True))
    roles: dict[int, Role] = {}
    for prefix, part in keras_private.optimizers.nested(optimizer):
        owners = [index[id(v)] for v in keras_private.optimizers.trained_variables(part)]
        for name, slots in keras_private.optimizers.slot_lists(part):
            for owner, variable in zip(owners, slots, strict=True):
                # Muon's lists hold None for parameters without the slot.
                if isinstance(variable, keras.Variable):
                    roles[id(variable)] = Role(name, owner)
        attributes = keras_private.optimizers.variable_attributes(part)
        for variable in part.variables:
            name = prefix + attributes.get(id(variable), variable.name)
            # The variables that are in no list are scalars.
            roles.setdefault(id(variable), Role(name))
    return [roles[id(v)] for v in optimizer.variables]


def roles_of_leaves(opt_state: PyTree, params: Mapping[Path, int]) -> list[Role]:
    """Returns the role of each leaf of an optax state.

    Args:
      opt_state: The state of a transformation that was initialized with params in nested dicts.
      params: The index of each parameter by its path. `Role.owner` is such an index.
    """
    leaves = jax.tree_util.tree_leaves_with_path(opt_state)
    return [_role(_tree.keys(path), params) for path, _ in leaves]


def _role(path: Path, params: Mapping[Path, int]) -> Role:
    # The slots in an optax state are trees with the structure of the params, so that the path of a
    # slot ends with the path of its parameter. The longest such ending counts.
    for start in range(len(path)):
        if path[start:] in params:
            return Role("/".join(path[:start]), params[path[start:]])
    return Role("/".join(path))


def to_plain_array(leaf: jax.Array) -> jax.Array:
    """Returns a leaf as an array that a Keras variable can hold: a PRNG key as its key data."""
    return jax.random.key_data(leaf) if _tree.is_key(leaf) else leaf


def from_plain_array(array: jax.Array, like: Any) -> jax.Array:
    """Returns the leaf from its `to_plain_array`, with the type of another one if that is a key."""
    is_key = _tree.is_key(like)
    return jax.random.wrap_key_data(array, impl=jax.random.key_impl(like)) if is_key else array
