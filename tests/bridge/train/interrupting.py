"""Models, arguments and interruptions that the tests of bridge.fit with a checkpointer share."""

import bridge  # isort: skip  # before keras: it chooses the backend

import pathlib
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
from keras import layers

import functrain as ft

RNG = np.random.default_rng(0)
X = RNG.normal(size=(83, 6)).astype(np.float32)
Y = (X[:, :1] > 0).astype(np.float32)
EPOCHS = 4
Build, Arguments = Callable[[], keras.Model], Callable[[], dict[str, Any]]


class Interrupted(Exception):  # noqa: N818  # it is none of the errors that are meant
    """Stands for whatever ends a process."""


class Interrupt(keras.callbacks.Callback):
    """Ends a fit in the midst of an epoch."""

    chunk_safe = True

    def __init__(self, batches: int) -> None:
        super().__init__()
        self.left = batches

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self.left -= 1
        if not self.left:
            raise Interrupted


def dense(width: int = 8, **compiled: Any) -> keras.Model:
    net = [layers.Dense(width, "relu"), layers.Dropout(0.3), layers.BatchNormalization()]
    model = keras.Sequential([keras.Input((6,)), *net, layers.Dense(1, "sigmoid")])
    metrics = ["accuracy", keras.metrics.AUC(name="auc")]
    how = {"optimizer": keras.optimizers.Adam(1e-2), "loss": "binary_crossentropy"}
    model.compile(**{**how, "metrics": metrics, **compiled})
    return model


def with_ema() -> keras.Model:
    return dense(optimizer=keras.optimizers.SGD(0.1, momentum=0.9, use_ema=True))


def plain() -> dict[str, Any]:
    return {}


def evaluated() -> dict[str, Any]:
    return {"validation_split": 0.25}


def stopping() -> dict[str, Any]:
    """Callbacks that remember, and stop before the end."""
    callbacks = [
        keras.callbacks.ReduceLROnPlateau("val_loss", patience=1, min_delta=0.1),
        keras.callbacks.LearningRateScheduler(lambda epoch, rate: rate * 0.8),
        keras.callbacks.EarlyStopping(
            "val_loss", patience=1, min_delta=0.05, restore_best_weights=True
        ),
    ]
    return {"validation_split": 0.25, "callbacks": callbacks}


def fit(make: Build, arguments: Arguments, way: Any = bridge.fit, **more: Any) -> Any:
    keras.utils.set_random_seed(0)
    model = make()
    keras.utils.set_random_seed(1)
    how = {"batch_size": 10, "epochs": EPOCHS, "verbose": 0, **arguments()}
    how["callbacks"] = [*how.get("callbacks", []), *more.pop("callbacks", [])]
    if way is bridge.fit:
        how["rewrites"] = "exact"
    return model, way(model, X, Y, **how, **more)


def fit_in_pieces(
    make: Build, arguments: Arguments, directory: pathlib.Path, when: Any, pieces: list[Any]
) -> Any:
    """Fits until it is interrupted, and again, with other steps per program each time."""
    for batches, fuse in pieces:
        checkpoints = ft.Checkpointer(directory, every=when)
        callbacks = [Interrupt(batches)] if batches else []
        try:
            found = fit(make, arguments, fuse=fuse, checkpointer=checkpoints, callbacks=callbacks)
        except Interrupted:
            assert batches
        else:
            assert not batches, "it was over before the interruption"
    return found
