"""What Keras's private names for a trainer mean (checked with Keras 3.15.1)."""

from bridge import keras_private  # isort: skip  # before keras: it chooses the backend

import itertools

import keras
import numpy as np
import pytest
from keras import layers

from tests.bridge.keras_private.models import compiled, epochs


def test_trainer_is_what_keras_makes_models_of():
    assert keras_private.trainer.is_trainer(compiled())
    assert not keras_private.trainer.is_trainer(layers.Dense(1))


def test_symbolic_build_takes_no_batch_where_all_is_built():
    def once():
        yield np.ones((4, 3)), np.ones((4, 2))

    model = compiled()
    keras_private.trainer.build_from(model, epochs())
    assert keras_private.trainer.is_built(model)
    source = keras_private.data.epochs(x=once())
    keras_private.trainer.build_from(model, source)
    assert len([next(items) for _, _, items in itertools.islice(source, 1)]) == 1


def test_initial_epoch_is_what_backup_and_restore_sets(tmp_path):
    model = compiled()
    assert keras_private.trainer.initial_epoch(model) is None
    backup = keras.callbacks.BackupAndRestore(tmp_path / "backup", delete_checkpoint=False)
    model.fit(np.ones((4, 3)), np.ones((4, 2)), epochs=2, verbose=0, callbacks=[backup])
    backup.on_train_begin()
    assert keras_private.trainer.initial_epoch(model) == 2


def test_metrics_result_or_logs_prefers_metrics_of_the_same_names():
    model = compiled()
    model.evaluate(np.ones((4, 3)), np.ones((4, 2)), verbose=0)
    found = keras_private.trainer.epoch_logs(model, {"loss": -1.0, "mae": -1.0})
    assert found["loss"] >= 0
    assert keras_private.trainer.epoch_logs(model, {"other": -1.0}) == {"other": -1.0}


def test_flatten_metrics_in_order_returns_a_list():
    model = compiled()
    model.evaluate(np.ones((4, 3)), np.ones((4, 2)), verbose=0)
    assert keras_private.trainer.metrics_in_order(model, {"mae": 2.0, "loss": 1.0}) == [1.0, 2.0]


def test_the_owner_of_a_step_is_another_object_after_compile():
    class Own(keras.Sequential):
        def make_train_function(self, force=False):
            raise AssertionError("not called")

    for cls in (keras.Sequential, Own):
        model = cls([keras.Input((3,)), layers.Dense(2)])
        model.compile("sgd", "mse")
        before = keras_private.trainer.owner_of_step(model, "train")
        assert keras_private.trainer.owner_of_step(model, "train") is before
        model.compile("adam", "mae", metrics=["mse"])
        assert keras_private.trainer.owner_of_step(model, "train") is not before


def test_losses_override_hides_the_losses_of_a_call():
    layer = layers.Dense(1, kernel_regularizer="l2")
    layer.build((None, 3))
    layer._losses_override.append("left behind")
    assert layer.losses == ["left behind"]
    keras_private.trainer.forget_losses(layer)
    assert float(layer.losses[0]) > 0


def test_values_that_a_failed_predict_left_beside_the_model_come_back() -> None:
    model = compiled()
    keras_private.trainer.build_from(model, epochs())
    before = model.get_weights()

    class Fails(keras.callbacks.Callback):
        def on_predict_batch_end(self, batch, logs=None):
            raise RuntimeError("the disk is full")

    with pytest.raises(RuntimeError, match="the disk is full"):
        model.predict(np.ones((4, 3), np.float32), verbose=0, callbacks=[Fails()])
    assert keras_private.variables.read(model.trainable_variables)[0] is None
    keras_private.trainer.reattach(model)
    np.testing.assert_array_equal(model.get_weights()[0], before[0])


def test_values_of_an_earlier_batch_are_forgotten() -> None:
    model = compiled()
    model.train_on_batch(np.ones((4, 3)), np.ones((4, 2)))
    model._jax_state_synced = False  # as after a train_on_batch that failed
    model.set_weights([np.full_like(x, 7) for x in model.get_weights()])
    keras_private.trainer.reattach(model)
    keras.callbacks.Callback().set_model(model)
    model.jax_state_sync()
    assert (model.get_weights()[0] == 7).all()


def test_logs_are_flat_sorted_and_of_floats():
    logs = {"b": np.float32(2), "a": {"d": keras.ops.ones(()), "c": 1}, "e": "text"}
    found = keras_private.trainer.as_floats({**logs, "rows": keras.ops.ones((2, 2))})
    assert isinstance(found.pop("rows"), np.ndarray)
    assert list(found.items()) == [("c", 1.0), ("d", 1.0), ("b", 2.0), ("e", "text")]
    assert [type(x) for x in found.values()] == [float, float, float, str]
