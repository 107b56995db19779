"""What a Keras optimizer remembers, sorted: slots that belong to a parameter, and scalars."""

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import jax
import keras
import optax

from bridge import keras_private
from functrain.internal import PyTree


class Slot(NamedTuple):
    """A variable of an optimizer that belongs to one parameter."""

    name: str
    owner: int  # the parameter's place among those the optimizer was built for


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


def sort(optimizer: Any, params: Sequence[Any]) -> list[Slot | str]:
    """Returns what each of `optimizer.variables` is: a parameter's slot, or a scalar's name.

    Keras finds a parameter's slot by its place in a list, and every list of that length is one of
    slots: its attribute's name, without underscores in front, is the slot's.

    Args:
      optimizer: A built Keras optimizer.
      params: The variables it was built for, in the order that owners are to be counted in.
    """
    place = {id(v): i for i, v in enumerate(params)}
    found: dict[int, Slot | str] = {}
    for prefix, part in _parts(optimizer):
        owners = [place[id(v)] for v in keras_private.optimizers.trained(part)]
        for name, values in keras_private.optimizers.slot_lists(part):
            for owner, variable in zip(owners, values, strict=True):
                if isinstance(variable, keras.Variable):
                    found[id(variable)] = Slot(name, owner)
        attributes = keras_private.optimizers.variable_attributes(part)
        for variable in part.variables:
            if id(variable) not in found:
                found[id(variable)] = prefix + attributes.get(id(variable), variable.name)
    return [found[id(v)] for v in optimizer.variables]


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


class SlotLayout(NamedTuple):
    """How the variables of a built Keras optimizer make up a `KerasOptState`.

    Attributes:
      optimizer: The optimizer, which may hold no values.
      roles: What each of `optimizer.variables` is.
      places: For each leaf of the params, its place in the optimizer's order.
      treedef: The structure of the params.
    """

    optimizer: Any
    roles: list[Slot | str]
    places: list[int]
    treedef: Any

    def gather(self, values: Sequence[Any], constraints: Any = None) -> KerasOptState:
        """Returns values of `optimizer.variables` as a state."""
        scalars: dict[str, Any] = {}
        slots: dict[str, dict[int, Any]] = {}
        for role, value in zip(self.roles, values, strict=True):
            if isinstance(role, Slot):
                slots.setdefault(role.name, {})[role.owner] = value
            else:
                scalars[role] = value
        trees = {
            name: self.treedef.unflatten([at.get(i, optax.MaskedNode()) for i in self.places])
            for name, at in slots.items()
        }
        return KerasOptState(scalars, trees, constraints)

    def scatter(self, state: KerasOptState) -> list[Any]:
        """Returns a state as the values of `optimizer.variables`: `gather`, backwards."""
        trees = {
            name: dict(zip(self.places, self.treedef.flatten_up_to(tree), strict=True))
            for name, tree in state.slots.items()
        }
        return [
            trees[role.name][role.owner] if isinstance(role, Slot) else state.scalars[role]
            for role in self.roles
        ]
