"""Other arguments of compile and fit, and callbacks that act between epochs."""

from typing import Any

import keras
from keras import optimizers

from tests.bridge import parity
from tests.bridge.parity import Case, X, Y, dense

CASES = parity.Cases()


@CASES
def initial_epoch() -> Case:
    return dense(initial_epoch=2, epochs=4)


@CASES
def steps_per_execution() -> Case:
    return dense(compiled={"steps_per_execution": 3})


@CASES
def steps_per_execution_that_never_fit() -> Case:
    return dense(compiled={"steps_per_execution": 20}, validation_data=(X, Y))


@CASES
def validation_in_some_epochs() -> Case:
    return dense(validation_data=(X, Y), validation_freq=[1, 4], epochs=4)


@CASES
def validation_of_many_callbacks() -> Case:
    stop = keras.callbacks.EarlyStopping(patience=1, min_delta=9.0, restore_best_weights=True)
    lower = keras.callbacks.ReduceLROnPlateau(patience=0, min_delta=9.0)
    return dense(callbacks=[stop, lower], validation_split=0.25, epochs=5)


class Edits(keras.callbacks.Callback):
    """Sets weights, the learning rate, a metric and stop_training between epochs."""

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        if epoch == 1:
            self.model.layers[0].kernel.assign(self.model.layers[0].kernel * 0.5)

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        self.model.optimizer.learning_rate = 0.1 / (epoch + 1)
        self.model.stop_training = epoch == 3


@CASES.every_run
def callback_that_edits() -> Case:
    return dense(callbacks=[Edits()], epochs=6)


@CASES
def averages_in_batches() -> Case:
    swap = keras.callbacks.SwapEMAWeights()
    optimizer = optimizers.Adam(0.1, use_ema=True, ema_momentum=0.5)
    return dense(compiled={"optimizer": optimizer}, callbacks=[swap], validation_split=0.25)


@CASES
def eager() -> Case:
    return dense(compiled={"run_eagerly": True}, epochs=1)


@CASES
def not_compiled() -> Case:
    return dense(compiled={"jit_compile": False}, epochs=1)


@CASES
def early_stopping() -> Case:
    stop = keras.callbacks.EarlyStopping(
        "loss", patience=1, min_delta=0.5, restore_best_weights=True
    )
    return dense(callbacks=[stop], epochs=6)


@CASES
def reduced_learning_rate() -> Case:
    lower = keras.callbacks.ReduceLROnPlateau("loss", factor=0.5, patience=0, min_delta=1)
    return dense(callbacks=[lower], epochs=5)


@CASES
def scheduled_learning_rate() -> Case:
    schedule = keras.callbacks.LearningRateScheduler(lambda epoch, lr: lr * 0.5)
    return dense(callbacks=[schedule], epochs=3)


@CASES
def swapped_averages() -> Case:
    swap = keras.callbacks.SwapEMAWeights(swap_on_epoch=True)
    optimizer = optimizers.SGD(0.1, use_ema=True, ema_momentum=0.5)
    return dense(compiled={"optimizer": optimizer}, callbacks=[swap], validation_data=(X, Y))


@CASES
def lambda_callback_of_epochs() -> Case:
    found = keras.callbacks.LambdaCallback(on_epoch_end=lambda epoch, logs: None)
    return dense(callbacks=[found])


@CASES.each
def test_fit_equals_keras_to_the_bit_whatever_is_fused(make: Any, fuse: Any) -> None:
    parity.assert_fits_as_keras(make, fuse)
