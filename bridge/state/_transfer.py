"""What a compiled optimizer remembers, as a state of optax, and back."""

import re
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import optax

from bridge import keras_private
from bridge.model import _variables
from bridge.optim._labels import labels
from bridge.optim._native import KerasCount, slot_fields
from bridge.optim._optax_optimizer import OptaxOptimizer, numbers
from bridge.optim._optimizers import inner
from bridge.optim._slots import KerasOptState, SlotLayout, sort
from functrain.internal import PyTree
from functrain.internal import tree as _tree

# An optimizer's variables, with a value for each.
Pairs: TypeAlias = list[tuple[Any, jax.Array]]


class UnfitError(ValueError):
    """The optimizer and the state have nothing to say to each other; the message says why."""


def from_optimizer(opt_state: PyTree, model: Any) -> tuple[PyTree, jax.Array]:
    """Returns a fresh state with copies of what the optimizer remembers, and its iterations.

    Raises:
      UnfitError: The optimizer is not built, or remembers something else.
    """
    optimizer = _optimizer(model)
    if not optimizer.built:
        raise UnfitError(f"the optimizer {optimizer.name!r} has not been built, and has no slots")
    take = _of_optax if isinstance(inner(optimizer), OptaxOptimizer) else _of_keras
    new, iterations = take(opt_state, model, optimizer)
    new = _tree.copy(new)
    lines = _tree.differences(opt_state, new)
    if lines:
        raise UnfitError(f"its slots are not those of tx:\n{_tree.bullets(lines)}")
    return new, iterations


def to_optimizer(opt_state: PyTree, model: Any, step: Any) -> Pairs:
    """Returns new values for the variables of the model's optimizer, which is built if need be.

    Raises:
      UnfitError: The state does not say what the optimizer remembers.
    """
    optimizer = _optimizer(model)
    is_optax = isinstance(inner(optimizer), OptaxOptimizer)
    if not (is_optax or _slot_nodes(opt_state, slot_fields(optimizer, opt_state))):
        raise UnfitError(_no_counterpart(optimizer, opt_state))
    if not optimizer.built:
        with keras_private.optimizers.all_or_nothing(optimizer):
            optimizer.build(model.trainable_variables)
    pairs = (_to_optax if is_optax else _to_keras)(opt_state, model, optimizer, step)
    lines = [
        f"{v.path}: expected {_tree.spec(v.value)}, got {_tree.spec(x)}"
        for v, x in pairs
        if (v.shape, v.dtype) != (x.shape, str(x.dtype))
    ]
    if lines:
        raise UnfitError(f"leaves of opt_state do not fit its slots:\n{_tree.bullets(lines)}")
    return pairs


def _optimizer(model: Any) -> Any:
    optimizer = getattr(model, "optimizer", None)
    if optimizer is None:
        raise UnfitError("the model has not been compiled with an optimizer")
    return optimizer


def _no_counterpart(optimizer: Any, opt_state: PyTree) -> str:
    return (
        f"nothing is known that both {type(optimizer).__name__} and this state of optax hold: "
        f"{_kinds(opt_state)}. Known are bridge.optimizer(model.optimizer), with or "
        "without native=True, the tx of a bridge.OptaxOptimizer, and optax's own adam, adamw, "
        "lion, rmsprop, adagrad and adadelta for Keras's of these names"
    )


def _kinds(state: Any) -> str:
    """Returns the names of the states in a state."""
    found = re.findall(r"namedtuple\[(\w+)\]", str(jax.tree.structure(state)))
    return ", ".join(dict.fromkeys(found)) or "no named state"


# Keras's own optimizers


def _layout(model: Any, optimizer: Any) -> tuple[SlotLayout, KerasOptState]:
    """Returns how what an optimizer remembers is keyed like `bridge.create_state`, and that."""
    held = _variables.layout(model).params
    numbered = _variables.nest({path: i for i, path in enumerate(held)})
    try:
        roles = sort(optimizer, list(held.values()))
    except KeyError as error:
        raise UnfitError(
            f"the optimizer {optimizer.name!r} was built for other variables than the model "
            "trains now. If layers were frozen or unfrozen, compile the model again"
        ) from error
    order, treedef = jax.tree.flatten(numbered)
    layout = SlotLayout(optimizer, roles, order, treedef)
    return layout, layout.gather([v.value for v in optimizer.variables])


def _slot_nodes(opt_state: PyTree, known: dict[type, Any]) -> list[Any]:
    """Returns the nodes of a state that hold slots of Keras."""
    return _tree.nodes(opt_state, KerasOptState, KerasCount, *known)


def _of_keras(opt_state: PyTree, model: Any, optimizer: Any) -> tuple[PyTree, jax.Array]:
    """Returns a state with Keras's slots where they belong, and the iterations."""
    (_, theirs), known = _layout(model, optimizer), slot_fields(optimizer, opt_state)
    scalars = theirs.scalars
    iterations = scalars["iterations" if "iterations" in scalars else "multi/iterations"]
    kinds = (KerasOptState, KerasCount, optax.ScaleByScheduleState, *known)
    used: set[str] = set()

    def filled(found: Any) -> Any:
        if not isinstance(found, kinds):
            return found
        if isinstance(found, KerasOptState):
            used.update(theirs.slots)
            rate = {k: x for k, x in found.scalars.items() if k == "learning_rate"}
            shared = {k: x for k, x in scalars.items() if k != "learning_rate" or rate}
            return KerasOptState({**rate, **shared}, theirs.slots, found.constraints)
        fields = {}
        for held in known.get(type(found), ()):
            if held.slot in theirs.slots:
                fields[held.field] = _signed(theirs.slots[held.slot], held.sign)
                used.add(held.slot)
        counts = {name: iterations for name in ("count", "iterations") if name in found._fields}
        return type(found)(**{**found._asdict(), **fields, **counts})

    new = jax.tree.map(filled, opt_state, is_leaf=lambda x: isinstance(x, kinds))
    if used != set(theirs.slots) or not _slot_nodes(opt_state, known):
        raise UnfitError(_no_counterpart(optimizer, opt_state))
    return new, iterations


def _signed(tree: PyTree, sign: int) -> PyTree:
    return tree if sign == 1 else jax.tree.map(lambda x: sign * x, tree)


def _to_keras(opt_state: PyTree, model: Any, optimizer: Any, step: Any) -> Pairs:
    layout, now = _layout(model, optimizer)
    known = slot_fields(optimizer, opt_state)
    scalars, slots = dict(now.scalars), dict(now.slots)
    counts = [jnp.asarray(step, jnp.int32)]
    filled: set[str] = set()
    for found in _slot_nodes(opt_state, known):
        if isinstance(found, KerasOptState):
            shared = {k: x for k, x in found.scalars.items() if k in scalars}
            odd = (set(scalars) ^ set(found.scalars)) - {"learning_rate"}
            if odd or set(slots) != set(found.slots):
                raise UnfitError(_no_counterpart(optimizer, opt_state))
            return _pairs(layout, KerasOptState({**scalars, **shared}, found.slots))
        counts += [getattr(found, n) for n in ("count", "iterations") if n in found._fields]
        for held in known.get(type(found), ()):
            slots[held.slot] = _signed(getattr(found, held.field), held.sign)
            filled.add(held.slot)
    if filled != set(slots):
        raise UnfitError(f"it has no {sorted(set(slots) - filled)}")
    scalars["iterations"] = counts[-1]
    return _pairs(layout, KerasOptState(scalars, slots))


def _pairs(layout: SlotLayout, state: KerasOptState) -> Pairs:
    """Returns the values for an optimizer's variables; slots of frozen params stay as they are.

    Where a param was frozen or masked, a state has None or `optax.MaskedNode()` in its place.
    """
    try:
        values = layout.scatter(state)
    except ValueError as error:  # such as a mask over a whole layer
        raise UnfitError(f"its slots are not shaped like the params: {error}") from error
    pairs = zip(layout.optimizer.variables, values, strict=True)
    return [(variable, value) for variable, value in pairs if _tree.is_array(value)]


# OptaxOptimizer


def _of_optax(opt_state: PyTree, model: Any, optimizer: Any) -> tuple[PyTree, jax.Array]:
    own = inner(optimizer)
    found = jax.tree.leaves(own.opt_state)
    leaves = [found[i] for i in _optax_places(opt_state, model, own)]
    return jax.tree.unflatten(jax.tree.structure(opt_state), leaves), own.iterations.value


def _to_optax(opt_state: PyTree, model: Any, optimizer: Any, step: Any) -> Pairs:
    own = inner(optimizer)
    slots = [own.plan.slots[i] for i in _optax_places(opt_state, model, own, may_lack_params=True)]
    values = map(numbers, jax.tree.leaves(opt_state))
    pairs = zip(slots, values, strict=True)
    return [*pairs, (own.variables[0], jnp.asarray(step, jnp.int32))]


def _optax_places(
    opt_state: PyTree, model: Any, optimizer: OptaxOptimizer, *, may_lack_params: bool = False
) -> list[int]:
    """Returns for each leaf its place in the optimizer's state, whatever the params' keys are.

    Args:
      opt_state: The state of optax.
      model: The model.
      optimizer: Its optimizer.
      may_lack_params: Whether the state may have no leaf at all for some params: frozen ones.
    """
    held = _variables.layout(model).params
    number = {id(v): i for i, v in enumerate(held.values())}
    marks = labels(opt_state, {path: i for i, path in enumerate(held)})
    plan = optimizer.plan
    try:
        theirs = {
            (prefix, None if of is None else number[id(plan.trained[of])]): i
            for i, (prefix, of) in enumerate(plan.labels)
        }
    except KeyError as error:
        raise UnfitError("it was built for other variables than the model trains now") from error
    missing = theirs.keys() - set(marks)
    frozen = {owner for _, owner in missing}
    is_frozen = None not in frozen and frozen.isdisjoint(mark.owner for mark in marks)
    if not theirs.keys() >= set(marks) or (missing and not (may_lack_params and is_frozen)):
        raise UnfitError(
            f"the state of its transformation is {_kinds(optimizer.opt_state)}, that of tx is "
            f"{_kinds(opt_state)}"
        )
    return [theirs[mark] for mark in marks]
