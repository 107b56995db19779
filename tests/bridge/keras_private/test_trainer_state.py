"""What Keras's private names for values in training mean (checked with Keras 3.15.1)."""

import bridge  # isort: skip  # before keras: it chooses the backend


import jax.numpy as jnp
import keras
import numpy as np
import pytest

from bridge import keras_private
from tests.bridge.keras_private.models import compiled, epochs

del bridge


def test_values_are_moved_without_a_copy() -> None:
    variable = keras.Variable([1.0, 2.0])
    (value,) = keras_private.trainer_state.read([variable])
    assert value is variable.value
    keras_private.trainer_state.write([variable], [None])
    assert keras_private.trainer_state.read([variable]) == [None]
    new = jnp.ones(2)
    keras_private.trainer_state.write([variable], [new])
    assert variable.value is new


def test_values_that_a_failed_predict_left_beside_the_model_come_back() -> None:
    model = compiled()
    keras_private.trainer.build_from(model, epochs())
    before = model.get_weights()

    class Fails(keras.callbacks.Callback):
        def on_predict_batch_end(self, batch, logs=None):
            raise RuntimeError("the disk is full")

    with pytest.raises(RuntimeError, match="the disk is full"):
        model.predict(np.ones((4, 3), np.float32), verbose=0, callbacks=[Fails()])
    assert keras_private.trainer_state.read(model.trainable_variables)[0] is None
    keras_private.trainer_state.reattach(model)
    np.testing.assert_array_equal(model.get_weights()[0], before[0])


def test_values_of_an_earlier_batch_are_forgotten() -> None:
    model = compiled()
    model.train_on_batch(np.ones((4, 3)), np.ones((4, 2)))
    model._jax_state_synced = False  # as after a train_on_batch that failed
    model.set_weights([np.full_like(x, 7) for x in model.get_weights()])
    keras_private.trainer_state.reattach(model)
    keras.callbacks.Callback().set_model(model)
    model.jax_state_sync()
    assert (model.get_weights()[0] == 7).all()
