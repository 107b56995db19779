"""Who among callbacks is called for batches."""

import bridge  # isort: skip  # before keras: it chooses the backend

from typing import Any

from keras.callbacks import Callback, CallbackList, LambdaCallback, ModelCheckpoint

from bridge.train._callbacks import BatchCallbacks
from tests.bridge.fitting import fresh

del bridge


class Own(Callback):
    def on_batch_end(self, batch: int, logs: Any = None) -> None:
        pass


class Listed(CallbackList):
    """May hold anything."""


def fusible(callback: Any) -> bool:
    held = CallbackList([callback], model=fresh())
    return BatchCallbacks(held, "train").fusible


def test_steps_are_fused_around_callbacks_that_leave_batches_alone_or_are_keras_s_own() -> None:
    assert fusible(Callback())
    assert fusible(LambdaCallback(on_epoch_end=lambda epoch, logs: None))
    assert fusible(ModelCheckpoint("x.keras", save_freq=5))
    assert not fusible(Own())
    assert not fusible(LambdaCallback(on_train_batch_end=lambda batch, logs: None))


def test_a_subclass_that_keeps_the_batch_methods_of_keras_is_one_of_keras_s() -> None:
    class Later(ModelCheckpoint):
        def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
            super().on_epoch_end(epoch, logs)

    class Sooner(ModelCheckpoint):
        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            super().on_train_batch_end(batch, logs)

    assert fusible(Later("x.keras", save_freq=5))
    assert not fusible(Sooner("x.keras", save_freq=5))


def test_a_list_of_a_class_of_the_users_may_hold_anything() -> None:
    assert not BatchCallbacks(Listed([], model=fresh()), "train").fusible


def test_a_callback_is_the_users_wherever_its_class_says_it_lies() -> None:
    class Lying(Own):
        def on_batch_end(self, batch: int, logs: Any = None) -> None:
            pass

    Lying.on_batch_end.__module__ = Lying.__module__ = "keras.src.callbacks.callback_test"
    assert not fusible(Lying())
