"""What Keras's private names for a trainer mean (checked with Keras 3.15.1)."""

import bridge  # isort: skip  # before keras: it chooses the backend

import itertools

import keras
import numpy as np
from keras import layers

from bridge import keras_private
from tests.bridge.keras_private.models import compiled, epochs

del bridge


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
