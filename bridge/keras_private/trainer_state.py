"""Where a model's values are while it trains: in its variables, or taken out of them."""

from collections.abc import Sequence
from typing import Any

import keras


def read(variables: Sequence[Any]) -> list[Any]:
    """Returns the arrays of variables, None for one that has none.

    Reads `Variable._value`; checked with Keras 3.15.1. `Variable.value` takes ten times as long,
    and raises for a variable without a value.
    """
    return [variable._value for variable in variables]


def write(variables: Sequence[Any], values: Sequence[Any]) -> None:
    """Gives variables other arrays, or None, without a copy or a check.

    Sets `Variable._value`; checked with Keras 3.15.1. `Variable.assign` takes a hundred times as
    long, and cannot take a value out of a variable.
    """
    for variable, value in zip(variables, values, strict=True):
        variable._value = value


def reattach(model: keras.Model) -> None:
    """Gives a model the values that a loop of Keras's has left beside it.

    Reads and sets `JAXTrainer._jax_state` and `_jax_state_synced`, and calls `jax_state_sync`;
    checked with Keras 3.15.1. Without it a model whose `predict` or `evaluate` was interrupted has
    no values, and those of an earlier `train_on_batch` come back after one that has failed.
    """
    lists = getattr(model, "_jax_state", None)
    is_needed = any(v._value is None for v in model.variables)
    if lists and is_needed and not any(x.is_deleted() for x in keras.tree.flatten(lists)):
        model.jax_state_sync()
    # Setting the attributes through Keras's __setattr__ would track every list.
    vars(model).update(_jax_state=None, _jax_state_synced=True)
