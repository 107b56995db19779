"""Everything fit takes as data."""

import bridge  # isort: skip  # before keras: it chooses the backend

from collections.abc import Iterator
from typing import Any

import keras
import numpy as np
from keras import layers, ops

from tests.bridge import parity
from tests.bridge.parity import BATCH, WEIGHTS, AddsLoss, Case, N, X, Y, classifier, dense

CASES = parity.Cases()
CLASS_WEIGHT = {0: 1.0, 1: 2.0, 2: 0.5, 3: 1.5}


class Batches(keras.utils.PyDataset):
    def __len__(self) -> int:
        return N // BATCH + 1

    def __getitem__(self, i: int) -> Any:
        rows = slice(i * BATCH, (i + 1) * BATCH)
        return X[rows], Y[rows]


def endless() -> Iterator[Any]:
    while True:
        for i in range(N // BATCH):
            yield X[i * BATCH :][:BATCH], Y[i * BATCH :][:BATCH]


def generated(batches: Iterator[Any], steps: int) -> Case:
    return dense(x=batches, y=None, steps_per_epoch=steps)


def of_many_sizes() -> Case:
    sizes = [16, 16, 8, 16, 16, 16, 5, 16, 8, 16, 16, 16]
    return generated(((X[:n] + i, Y[:n]) for i, n in enumerate(sizes)), 6)


class Grows(keras.callbacks.Callback):
    """Changes an array in place before every epoch."""

    def __init__(self, array: np.ndarray) -> None:
        super().__init__()
        self.array = array

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        self.array += 1


def growing() -> Case:
    x = X.astype(np.float64)
    return dense(x=x, callbacks=[Grows(x)])


CASES.table(
    every_run="sample_weight validation_split generator growing_float64",
    shuffled=lambda: dense(shuffle=True),
    shuffled_in_batches=lambda: dense(shuffle="batch"),
    one_size_of_batches=lambda: dense(x=X[:96], y=Y[:96]),
    sample_weight=lambda: dense(
        compiled={"weighted_metrics": ["mae"], "metrics": ["mse"]}, sample_weight=WEIGHTS
    ),
    class_weight=lambda: classifier(class_weight=CLASS_WEIGHT),
    validation_split=lambda: dense(layers.Dropout(0.3), validation_split=0.3),
    validation_data=lambda: dense(
        validation_data=(X[:40], Y[:40], WEIGHTS[:40]),
        validation_batch_size=8,
        validation_freq=2,
        epochs=4,
    ),
    validation_steps=lambda: dense(validation_data=(X, Y), validation_steps=2),
    py_dataset=lambda: dense(x=Batches(), y=None, validation_data=Batches()),
    generator=lambda: generated(endless(), 7),
    generator_of_jax_arrays=lambda: generated(
        (tuple(map(ops.convert_to_tensor, batch)) for batch in endless()), 7
    ),
    generator_of_many_sizes=of_many_sizes,
    generator_of_weights=lambda: generated(
        ((x, y, np.arange(1, BATCH + 1, dtype=np.float32)) for x, y in endless()), 5
    ),
    steps_per_epoch=lambda: dense(steps_per_epoch=3, epochs=2),
    steps_of_many_epochs_from_arrays=lambda: dense(
        steps_per_epoch=5, epochs=3, shuffle=True, x=np.tile(X, (3, 1)), y=np.tile(Y, (3, 1))
    ),
    jax_arrays=lambda: dense(x=ops.convert_to_tensor(X), y=ops.convert_to_tensor(Y)),
    growing_float64=growing,
)


@CASES
def py_dataset_on_threads() -> Case:
    model, arguments = dense(x=Batches(workers=2, max_queue_size=4), y=None)
    # Building takes a batch, after which Keras's own order depends on how far the threads were.
    model.fit(X, Y, verbose=0)
    return model, arguments


def compiled(model: keras.Model, **arguments: Any) -> Case:
    model.compile("adam", "mse")
    return model, arguments


@CASES
def sequences_of_several_lengths() -> Case:
    net = [layers.Embedding(10, 4), layers.GlobalAveragePooling1D(), layers.Dense(4)]
    model = keras.Sequential([keras.Input((None,), dtype="int32"), *net])
    lengths = [*[5] * 4, *[9] * 6, 5, 7, 5, 7, *[9] * 4]
    rng = np.random.default_rng(0)
    batches = ((rng.integers(0, 10, (BATCH, n), np.int32), Y[:BATCH]) for n in lengths)
    return compiled(model, x=batches, steps_per_epoch=6)


@CASES
def bytes_scaled_in_the_model() -> Case:
    net = [keras.Input((8,), dtype="uint8"), layers.Rescaling(1 / 255), layers.Dense(4)]
    return compiled(keras.Sequential(net), x=(X * 20 + 128).astype(np.uint8), y=Y)


@CASES
def nested_inputs() -> Case:
    a, b, c = (keras.Input((8,), name=name) for name in "abc")
    x = layers.Concatenate()([a, b, c])
    model = keras.Model([a, {"b": b, "c": c}], layers.Dense(4)(x))
    data = [X, {"b": -X, "c": X**2}]
    return compiled(model, x=data, y=Y, validation_split=0.25, batch_size=BATCH)


@CASES
def inputs_without_targets() -> Case:
    model = keras.Sequential([keras.Input((8,)), layers.Dense(8), AddsLoss(), layers.Dense(4)])
    model.compile("adam")
    return model, {"x": X}


@CASES.each
def test_fit_equals_keras_to_the_bit_whatever_is_fused(make: Any, fuse: Any) -> None:
    parity.assert_fits_as_keras(make, fuse)


class Reused(Batches):
    """Batches in one memory."""

    def __init__(self) -> None:
        super().__init__()
        self.x, self.y = np.empty_like(X[:BATCH]), np.empty_like(Y[:BATCH])

    def __len__(self) -> int:
        return N // BATCH

    def __getitem__(self, i: int) -> Any:
        self.x[:], self.y[:] = X[i * BATCH :][:BATCH], Y[i * BATCH :][:BATCH]
        return self.x, self.y


def test_a_py_dataset_may_reuse_the_memory_of_a_batch() -> None:
    model, _ = dense(compiled={"steps_per_execution": 3})
    found = bridge.predict(model, Reused(), verbose=0)
    np.testing.assert_allclose(found, model.predict(X, verbose=0)[: len(found)], rtol=1e-5)
