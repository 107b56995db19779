"""Other arguments of compile and fit, and callbacks that act between epochs."""

from typing import Any

import keras
from keras import callbacks, optimizers

from tests.bridge import parity
from tests.bridge.parity import X, Y, dense

CASES = parity.Cases()
HELD = {"validation_data": (X, Y)}


class Edits(callbacks.Callback):
    """Sets weights, the learning rate, a metric and stop_training between epochs."""

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        if epoch == 1:
            self.model.layers[0].kernel.assign(self.model.layers[0].kernel * 0.5)

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        self.model.optimizer.learning_rate = 0.1 / (epoch + 1)
        self.model.stop_training = epoch == 3


def many_callbacks() -> parity.Case:
    stop = callbacks.EarlyStopping(patience=1, min_delta=9.0, restore_best_weights=True)
    lower = callbacks.ReduceLROnPlateau(patience=0, min_delta=9.0)
    halve = callbacks.LearningRateScheduler(lambda epoch, rate: rate * 0.5)
    return dense(callbacks=[stop, lower, halve], validation_split=0.25, epochs=5)


def averages(**swap: Any) -> parity.Case:
    optimizer = optimizers.Adam(0.1, use_ema=True, ema_momentum=0.5)
    swapping = [keras.callbacks.SwapEMAWeights(**swap)]
    return dense(compiled={"optimizer": optimizer}, callbacks=swapping, **HELD)


CASES.table(
    every_run="callback_that_edits",
    initial_epoch=lambda: dense(initial_epoch=2, epochs=4),
    steps_per_execution=lambda: dense(compiled={"steps_per_execution": 3}),
    long_executions=lambda: dense(compiled={"steps_per_execution": 20}, **HELD),
    validation_in_some_epochs=lambda: dense(validation_freq=[1, 4], epochs=4, **HELD),
    callback_that_edits=lambda: dense(callbacks=[Edits()], epochs=6),
    many_callbacks=many_callbacks,
    averages_in_batches=averages,
    averages_in_epochs=lambda: averages(swap_on_epoch=True),
    eager=lambda: dense(compiled={"run_eagerly": True}, epochs=1),
    not_compiled=lambda: dense(compiled={"jit_compile": False}, epochs=1),
)


@CASES.each
def test_fit_equals_keras_to_the_bit_whatever_is_fused(make: Any, fuse: Any) -> None:
    parity.assert_fits_as_keras(make, fuse)
