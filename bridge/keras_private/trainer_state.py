"""The record of where a model's values are while it trains."""

from collections.abc import Sequence
from typing import Any

import keras


def publish(model: keras.Model, lists: dict[str, Any]) -> None:
    """Tells a model where its variables' new values are, without assigning them.

    Sets `JAXTrainer._jax_state` and `_jax_state_synced`; checked with Keras 3.15.1. They are
    assigned when a callback reads `callback.model`, which calls `jax_state_sync`. Without it the
    values must be assigned before every callback, or callbacks see old ones.
    """
    # Setting the attributes through Keras's __setattr__ would track every list, which takes longer.
    vars(model).update(_jax_state=lists, _jax_state_synced=False)


def purge(model: keras.Model, fields: Sequence[str]) -> None:
    """Removes the values from a model's variables; `publish` says where the values are.

    Calls `JAXTrainer._purge_model_variables`; checked with Keras 3.15.1. Without it the model
    keeps old values in memory while it trains, beside the new ones.
    """
    model._purge_model_variables(**{f"{name}_variables": True for name in fields})


def is_synced(model: keras.Model) -> bool:
    """Returns True if the model's variables have the values of `publish`, or newer ones.

    Reads `JAXTrainer._jax_state_synced`; checked with Keras 3.15.1. Without it changes made by a
    callback are overwritten.
    """
    return bool(model._jax_state_synced)


def sync(model: keras.Model) -> None:
    """Assigns the values of `publish` to the variables, unless that has been done.

    Calls `JAXTrainer.jax_state_sync`; checked with Keras 3.15.1.
    """
    model.jax_state_sync()
    forget(model)


def forget(model: keras.Model) -> None:
    """Makes the values in a model's variables count, instead of those of `publish`.

    Sets `JAXTrainer._jax_state` and `_jax_state_synced`; checked with Keras 3.15.1. Without it the
    values of an earlier `train_on_batch` come back after another one that has failed.
    """
    vars(model).update(_jax_state=None, _jax_state_synced=True)
