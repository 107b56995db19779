"""keras.distribution under bridge.fit: the numbers of model.fit, and variables that stay put."""

import bridge  # isort: skip  # before keras: it chooses the backend

from collections.abc import Iterator
from typing import Any

import jax
import keras
import numpy as np
import pytest
from keras import layers

import functrain as ft

RNG = np.random.default_rng(0)
X = RNG.normal(size=(48, 8)).astype(np.float32)
Y = RNG.normal(size=(48, 4)).astype(np.float32)

pytestmark = pytest.mark.skipif(jax.local_device_count() < 2, reason="needs two devices")


def data_parallel() -> Any:
    return keras.distribution.DataParallel(devices=keras.distribution.list_devices()[:2])


def model_parallel() -> Any:
    devices = keras.distribution.list_devices()[:2]
    mesh = keras.distribution.DeviceMesh((1, 2), ["batch", "model"], devices)
    layout = keras.distribution.LayoutMap(mesh)
    layout[".*dense.*kernel"] = (None, "model")
    layout[".*dense.*bias"] = ("model",)
    return keras.distribution.ModelParallel(layout_map=layout, batch_dim_name="batch")


@pytest.fixture(params=[data_parallel, model_parallel], ids=lambda make: make.__name__)
def distribution(request: pytest.FixtureRequest) -> Iterator[Any]:
    before = keras.distribution.distribution()
    found = request.param()
    keras.distribution.set_distribution(found)
    yield found
    keras.distribution.set_distribution(before)


def fresh() -> keras.Model:
    keras.utils.set_random_seed(0)
    net = [keras.Input((8,)), layers.Dense(8, "relu"), layers.Dropout(0.2), layers.Dense(4)]
    model = keras.Sequential(net)
    model.compile("adam", "mse", metrics=["mae"])
    return model


@pytest.mark.parametrize(
    "fuse", ["auto", *(pytest.param(k, marks=pytest.mark.long) for k in (1, 3))]
)
def test_fit_equals_keras_and_shardings_do_not_drift(distribution: Any, fuse: Any) -> None:
    theirs, ours = fresh(), fresh()
    kwargs = {"batch_size": 8, "epochs": 2, "verbose": 0, "shuffle": False}
    held = {"validation_data": (X[:16], Y[:16])}
    expected = theirs.fit(X, Y, **kwargs, **held)
    before = [v.value.sharding for v in ours.variables]
    kernels = [v.value for v in ours.variables if v.path.endswith("kernel")]
    divided = isinstance(distribution, keras.distribution.ModelParallel)
    assert all(x.sharding.is_fully_replicated != divided for x in kernels)
    history = bridge.fit(ours, X, Y, **kwargs, **held, fuse=fuse, rewrites="exact")
    assert history.history == expected.history
    for a, b, sharding in zip(theirs.variables, ours.variables, before, strict=True):
        np.testing.assert_array_equal(a.value, b.value)
        assert b.value.sharding.is_equivalent_to(sharding, b.value.ndim)
    np.testing.assert_array_equal(
        theirs.predict(X, batch_size=8, verbose=0),
        bridge.predict(ours, X, batch_size=8, verbose=0, fuse=fuse),
    )


def test_examples_that_devices_do_not_divide_are_evaluated_and_predicted(distribution: Any) -> None:
    model, x, y = fresh(), X[:43], Y[:43]
    outputs = bridge.predict(model, x, batch_size=8, verbose=0)
    dense = [v.numpy().astype(np.float64) for v in model.trainable_variables]
    expected = np.maximum(x @ dense[0] + dense[1], 0) @ dense[2] + dense[3]
    np.testing.assert_allclose(outputs, expected, atol=1e-5)
    errors = expected - y
    values = bridge.evaluate(model, x, y, batch_size=8, verbose=0, return_dict=True)
    assert values["loss"] == pytest.approx(np.mean(errors**2), rel=1e-5)
    assert values["mae"] == pytest.approx(np.mean(np.abs(errors)), rel=1e-5)
    history = bridge.fit(
        model, X[:8], Y[:8], validation_data=(x, y), validation_batch_size=5, verbose=0
    )
    values = bridge.evaluate(model, x, y, batch_size=43, verbose=0, return_dict=True)
    assert history.history["val_loss"] == [pytest.approx(values["loss"], rel=1e-5)]


def test_arrays_of_each_process_are_known_to_go_on_exactly(distribution: Any, tmp_path) -> None:
    x = ft.distributed.local(X, distribution.get_data_layout((1,)).backend_layout)
    for epochs in (1, 2):  # the second would warn
        how = {"epochs": epochs, "batch_size": 8, "checkpointer": ft.Checkpointer(tmp_path)}
        bridge.fit(fresh(), x, Y, verbose=0, **how)
