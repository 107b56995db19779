"""What Keras's private names for values in training mean (checked with Keras 3.15.1)."""

import bridge  # isort: skip  # before keras: it chooses the backend


import keras
import numpy as np

from bridge import keras_private
from tests.bridge.keras_private.models import compiled, epochs

del bridge


def test_jax_state_is_assigned_when_a_callback_reads_its_model():
    model = compiled()
    keras_private.trainer.build_from(model, epochs())
    callback = keras.callbacks.Callback()
    callback.set_model(model)
    new = [v.value + 1 for v in model.trainable_variables]
    keras_private.trainer_state.publish(model, {"trainable_variables": new})
    keras_private.trainer_state.purge(model, ["trainable"])
    assert not keras_private.trainer_state.is_synced(model)
    assert callback.model is model
    assert keras_private.trainer_state.is_synced(model)
    np.testing.assert_array_equal(model.trainable_variables[0].value, new[0])


def test_sync_assigns_once():
    model = compiled()
    new = [v.value + 1 for v in model.variables]
    keras_private.trainer_state.publish(model, {"trainable_variables": new})
    keras_private.trainer_state.sync(model)
    before = np.asarray(model.variables[0].value)
    keras_private.trainer_state.sync(model)
    np.testing.assert_array_equal(model.variables[0].value, before)
    assert keras_private.trainer_state.is_synced(model)
