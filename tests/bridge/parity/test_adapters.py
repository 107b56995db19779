"""Data of other libraries. `make test-adapters` has them all; elsewhere what is missing is skipped.

Keras's own adapters read them; what is held here is that chunks of their batches are the batches.
"""

import bridge  # isort: skip  # before keras: it chooses the backend

import warnings
from typing import Any

import keras
import numpy as np
import pytest
from keras import layers

from tests.bridge import parity
from tests.bridge.parity import BATCH, LABELS, WEIGHTS, Case, X, Y, classifier, dense

pytestmark = [
    pytest.mark.adapters,
    # A source whose length Keras does not know ends with this, once.
    pytest.mark.filterwarnings("ignore:Your input ran out of data:UserWarning"),
    # torch 2.13 asks its own deprecated functions.
    pytest.mark.filterwarnings("ignore::DeprecationWarning:torch"),
]
CASES = parity.Cases()


def library(name: str) -> Any:
    """Imports a library, whose own warnings are its own affair, or skips the test."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return pytest.importorskip(name)


def of(x: Any, **more: Any) -> Case:
    return dense(x=x, y=None, **more)


@CASES
def pandas_frames() -> Case:
    pandas = library("pandas")
    return dense(x=pandas.DataFrame(X), y=pandas.DataFrame(Y), batch_size=BATCH, shuffle=True)


@CASES.every_run
def pandas_frame_and_series() -> Case:
    pandas = library("pandas")
    model, arguments = classifier(batch_size=BATCH, validation_split=0.25)
    series = {"y": pandas.Series(LABELS), "sample_weight": pandas.Series(WEIGHTS)}
    return model, {**arguments, **series, "x": pandas.DataFrame(X)}


def rows(grain: Any) -> Any:
    class Rows(grain.sources.RandomAccessDataSource):
        def __len__(self) -> int:
            return len(X)

        def __getitem__(self, i: int) -> Any:
            return X[i], Y[i]

    return Rows()


@CASES.every_run
def grain_map_dataset() -> Case:
    grain = library("grain")
    return of(grain.MapDataset.source(rows(grain)).shuffle(seed=3).batch(BATCH))


def tf_rows(*more: Any) -> Any:
    return library("tensorflow").data.Dataset.from_tensor_slices((X, Y, *more))


@CASES.every_run
def tf_dataset_of_dicts() -> Case:
    tf = library("tensorflow")
    inputs = {name: keras.Input((8,), name=name) for name in "ab"}
    model = keras.Model(inputs, layers.Dense(4)(layers.Concatenate()(list(inputs.values()))))
    model.compile("adam", "mse")
    return model, {"x": tf.data.Dataset.from_tensor_slices(({"a": X, "b": -X}, Y)).batch(BATCH)}


@CASES.every_run
def tf_dataset_and_class_weight() -> Case:
    model, arguments = classifier(class_weight={0: 1.0, 1: 2.0, 2: 0.5, 3: 1.5})
    batches = library("tensorflow").data.Dataset.from_tensor_slices((X, LABELS)).batch(BATCH)
    return model, {**arguments, "x": batches, "y": None}


def torch_loader(**options: Any) -> Any:
    data = library("torch.utils.data")
    torch = library("torch")
    tensors = data.TensorDataset(torch.from_numpy(X), torch.from_numpy(Y))
    seeded = torch.Generator().manual_seed(0)
    return data.DataLoader(tensors, batch_size=BATCH, generator=seeded, **options)


@CASES.every_run
def torch_data_loader() -> Case:
    return of(torch_loader(), validation_data=torch_loader())


CASES.table(
    every_run="tf_dataset endless_tf shuffled_torch torch_processes torch_tensors tf_tensors",
    tf_dataset=lambda: of(
        tf_rows().shuffle(50, seed=1).batch(BATCH).prefetch(2),
        validation_data=tf_rows().take(40).batch(8),
    ),
    endless_tf=lambda: of(tf_rows(WEIGHTS).repeat().batch(BATCH), steps_per_epoch=5),
    shuffled_torch=lambda: of(torch_loader(shuffle=True, drop_last=True)),
    torch_processes=lambda: of(
        torch_loader(num_workers=2, multiprocessing_context="spawn"), epochs=1
    ),
    torch_tensors=lambda: dense(
        x=library("torch").from_numpy(X), y=library("torch").from_numpy(Y), batch_size=BATCH
    ),
    tf_tensors=lambda: dense(
        x=library("tensorflow").constant(X),
        y=library("tensorflow").constant(Y),
        batch_size=BATCH,
        shuffle=True,
    ),
)


@CASES
def sparse_matrices() -> Case:
    scipy = library("scipy.sparse")
    sparse = scipy.coo_matrix(np.where(X > 0.5, X, 0))
    inputs = keras.Input((8,), sparse=True)
    model = keras.Model(inputs, layers.Dense(4)(inputs))
    model.compile("adam", "mse")
    return model, {"x": sparse, "y": Y, "batch_size": BATCH}


@CASES.each
def test_fit_equals_keras_to_the_bit_whatever_is_fused(make: Any, fuse: Any) -> None:
    parity.assert_fits_as_keras(make, fuse)


@pytest.mark.parametrize(
    "make",
    [
        grain_map_dataset,
        tf_dataset_of_dicts,
        torch_data_loader,
        pandas_frames,
        pytest.param(sparse_matrices, marks=pytest.mark.long),
    ],
)
def test_evaluate_and_predict_equal_keras(make: Any) -> None:
    model, arguments = make()
    data = {name: arguments[name] for name in ("x", "y", "batch_size") if name in arguments}
    ours = bridge.evaluate(model, **data, verbose=0, return_dict=True)
    assert ours == model.evaluate(**data, verbose=0, return_dict=True)
    data.pop("y", None)
    theirs = model.predict(**data, verbose=0)
    np.testing.assert_array_equal(bridge.predict(model, **data, verbose=0, fuse=3), theirs)
