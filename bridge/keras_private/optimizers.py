"""An optimizer's arguments and variables, and how it is built and applied."""

import contextlib
from collections.abc import Iterator
from typing import Any

import keras

from functrain.internal import DeferredSignals


def settings(optimizer: Any) -> dict[str, Any]:
    """Returns an optimizer's `get_config`, with a schedule or a function as it is.

    Reads `Optimizer._learning_rate`, and sets it in a copy; checked with Keras 3.15.1. Without it a
    user's schedule would have to be serializable to be used.
    """
    rate = getattr(optimizer, "_learning_rate", None)
    if isinstance(rate, keras.Variable) or not callable(rate):
        return dict(optimizer.get_config())
    # `copy.copy` would pickle the optimizer, and the schedule with it.
    copy = object.__new__(type(optimizer))
    vars(copy).update(vars(optimizer), _learning_rate=0.0)
    # A schedule has no state, so that two optimizers may use it.
    return {**copy.get_config(), "learning_rate": rate}


def optimizer_map(optimizer: Any) -> Any:
    """Returns what assigns variables to the parts of a MultiOptimizer: an OptimizerMap or function.

    Reads `MultiOptimizer._optimizer_map`; checked with Keras 3.15.1. Without it a MultiOptimizer
    that holds a function cannot be copied.
    """
    return optimizer._optimizer_map


def excluded_from_weight_decay(optimizer: Any) -> tuple[set[int], str]:
    """Returns the ids of variables, and the pattern of names, that weight decay leaves out.

    Reads `Optimizer._exclude_from_weight_decay` and `_exclude_from_weight_decay_pattern`; checked
    with Keras 3.15.1, whose `get_config` leaves both out.
    """
    pattern = getattr(optimizer, "_exclude_from_weight_decay_pattern", None)
    ids: set[int] = getattr(optimizer, "_exclude_from_weight_decay", set())
    return set(ids), pattern.pattern if pattern else ""


def trained_variables(optimizer: Any) -> list[Any]:
    """Returns the variables that an optimizer was built for, in the order of its slots.

    Reads `Optimizer._trainable_variables`; checked with Keras 3.15.1. Without it slots cannot be
    told apart, nor can an optimizer that was built for another model.
    """
    return list(optimizer._trainable_variables)


def slot_lists(optimizer: Any) -> list[tuple[str, list[Any]]]:
    """Returns, by name, the lists that hold a slot or other object for each trained variable.

    Reads the lists among an optimizer's attributes, except `Optimizer._variables` and
    `_trainable_variables`; a name has no underscores around it. Checked with Keras 3.15.1. Without
    it slots could be distinguished by the names of variables only, which the user chooses.
    """
    # Every class of optimizer names the lists of its slots differently, such as `_momentums`.
    n = len(trained_variables(optimizer))
    lists: list[tuple[str, list[Any]]] = []
    for name, value in vars(optimizer).items():
        is_registry = name in ("_variables", "_trainable_variables")
        if isinstance(value, list) and len(value) == n > 0 and not is_registry:
            lists.append((name.strip("_"), value))
    return lists


def variable_attributes(optimizer: Any) -> dict[int, str]:
    """Returns the names of the attributes that are a variable, by the variable's id.

    A name has no underscores around it, as in `Optimizer._learning_rate`; checked with Keras
    3.15.1.
    """
    names: dict[int, str] = {}
    for name, value in vars(optimizer).items():
        if isinstance(value, keras.Variable):
            names[id(value)] = name.strip("_")
    return names


def is_of_other_variables(error: ValueError) -> bool:
    """Returns True for the error of an optimizer that was built for fewer or more variables.

    Reads the message of `Optimizer.stateless_apply`, which is inside another one if the optimizer
    is in a LossScaleOptimizer; checked with Keras 3.15.1. Without it the user reads of an argument
    of a method that they have not called.
    """
    return "whereas the optimizer was built with" in str(error)


@contextlib.contextmanager
def atomic_build(optimizer: Any) -> Iterator[None]:
    """Context manager for a build: delays Ctrl-C, and undoes a build that raises an exception.

    Restores the attributes of an optimizer, `Optimizer._variables` and `_tracker.stored_ids` among
    them; checked with Keras 3.15.1. Keras sets `built` before it makes the slots: without this, an
    optimizer that ran out of memory there counts as built, and every later step misses its slots.
    """
    # An optimizer that is built is left alone, and needs no snapshot.
    is_built = optimizer is None or optimizer.built
    parts = [] if is_built else [part for _, part in nested(optimizer)]
    snapshots = [(part, dict(vars(part)), list(part._variables)) for part in parts]
    # DeferredSignals raises KeyboardInterrupt when it exits, and the build is complete by then.
    with DeferredSignals():
        try:
            yield
        except BaseException:
            for part, attributes, variables in snapshots:
                # Keras's tracker holds this list object, so it is changed in place.
                part._variables[:] = variables
                part._tracker.stored_ids["variables"] = set(map(id, variables))
                vars(part).clear()
                vars(part).update(attributes)
            raise


def nested(optimizer: Any) -> Iterator[tuple[str, Any]]:
    """Yields the optimizers inside an optimizer and itself, with prefixes for their scalars.

    Inner optimizers come first, since `variables` of the outer one includes theirs. Public names
    only.
    """
    if isinstance(optimizer, keras.optimizers.LossScaleOptimizer):
        yield from nested(optimizer.inner_optimizer)
        yield "loss_scale/", optimizer
    elif isinstance(optimizer, keras.optimizers.MultiOptimizer):
        for i, inner in enumerate(optimizer.optimizers):
            for prefix, part in nested(inner):
                yield f"{i}/{prefix}", part
        yield "multi/", optimizer
    else:
        yield "", optimizer


class GradientsOnly(keras.optimizers.Optimizer):  # type: ignore[misc]  # keras has no types
    """An optimizer that updates all variables at once, by `update_all`.

    Overrides `Optimizer._backend_apply_gradients`; checked with Keras 3.15.1. `apply` still does
    the rest as in Keras: constraints, float8 scales, the count of iterations. Without it an
    optimizer sees one variable at a time.
    """

    def update_all(self, grads: list[Any], variables: list[Any]) -> None:
        """Assigns new values to variables, which are some of those that it was built for."""
        raise NotImplementedError

    def _backend_apply_gradients(self, grads: list[Any], trainable_variables: list[Any]) -> None:
        self.update_all(list(grads), list(trainable_variables))
