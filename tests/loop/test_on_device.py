"""Data that a run on an accelerator puts there once; here, the accelerator is a CPU."""

import jax
import jax.numpy as jnp
import keras
import numpy as np
import optax
import pytest

import bridge
import functrain as ft
from bridge.keras_private.data import ArrayBatches
from bridge.train import _runs
from functrain.data._on_device import OnDevice
from functrain.loop import _arguments, _passes
from functrain.targets._chips import Chip

from ..conftest import digest

RNG = np.random.default_rng(0)
X, Y = RNG.normal(size=(22, 4)).astype(">f4"), RNG.normal(size=(22, 1)).astype(np.float32)
TX = optax.adam(1e-2)


def loss_fn(params, model_state, batch, *, rng, training):
    x, y = batch
    return jnp.mean((x @ params["w"] - y) ** 2), ft.Aux(model_state)


STEP = ft.train_step(loss_fn, TX, metrics={"running": ft.metrics.mean_loss()})
EVAL = ft.eval_step(loss_fn)


@pytest.fixture
def accelerator(monkeypatch):
    """Returns a function that makes runs believe in an accelerator with so many bytes."""
    taken: list[int] = []
    take = OnDevice.take

    def recording(self, rows, k):
        taken.append(k)
        return take(self, rows, k)

    def make(memory_bytes: int) -> list[int]:
        chip = Chip("made up", memory_bytes, 1e12, 1e14, 1e9, "")
        for module in (_arguments, _passes, _runs):
            monkeypatch.setattr(module, "accelerator_of", lambda tree: chip)
        monkeypatch.setattr(OnDevice, "take", recording)
        return taken

    return make


def loader(seed: int = 0, **how) -> ft.ArrayLoader:
    return ft.ArrayLoader((X, Y), 4, shuffle=True, seed=seed, **how)


def fit(directory, data=None, *, epochs=3, **how):
    state = ft.TrainState.create(params={"w": jnp.zeros((4, 1))}, tx=TX)
    data = loader() if data is None else data
    saving = ft.Checkpointer(directory, every=4)
    evaluation = {"eval_data": loader(1), "eval_step": EVAL}
    how = {"verbose": 0, "checkpointer": saving, **evaluation, **how}
    trained, history = ft.fit(state, STEP, data, epochs=epochs, **how)
    values = {k: np.asarray(v).tolist() for k, v in history.epochs.items() if k != "seconds"}
    return digest(trained), values


def test_a_fit_takes_the_batches_of_host_data_and_resumes_to_the_bit(accelerator, tmp_path) -> None:
    expected = fit(tmp_path / "host")
    taken = accelerator(2**30)
    assert fit(tmp_path / "device") == expected
    fit(tmp_path / "resumed", epochs=2)
    assert fit(tmp_path / "resumed") == expected
    assert len(taken) > 20
    host = loader(placement="host")
    del taken[:]
    assert fit(tmp_path / "told so", host, eval_data=host) == fit(tmp_path / "b", eval_data=host)
    assert taken


def test_epochs_of_any_length_are_those_of_host_data(accelerator, tmp_path) -> None:
    how = {"steps_per_epoch": 4, "epochs": 4}
    expected = fit(tmp_path / "host", **how)
    taken = accelerator(2**30)
    assert fit(tmp_path / "device", **how) == expected
    assert taken


def test_arrays_without_room_on_the_device_stay_on_the_host(accelerator, tmp_path) -> None:
    expected = fit(tmp_path / "host")
    taken = accelerator(1000)
    with pytest.warns(UserWarning, match=r"data: the arrays take .* GiB, and the device has room"):
        assert fit(tmp_path / "full") == expected
    assert not taken


def test_data_for_other_devices_and_data_of_a_transform_stay_on_the_host(accelerator) -> None:
    taken = accelerator(2**30)
    mesh = jax.make_mesh((2,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    transformed = loader(transform=lambda batch, rng: batch)
    for how in ({"sharding": mesh, "data": loader(drop_remainder=True)}, {"data": transformed}):
        state = ft.TrainState.create(params={"w": jnp.zeros((4, 1))}, tx=TX)
        ft.fit(state, STEP, how.pop("data"), verbose=0, **how)
    second = jax.device_put(state, jax.devices()[1])
    ft.fit(second, STEP, loader(), verbose=0)
    assert not taken
    assert isinstance(transformed.batch(0, 0)[0], np.ndarray)


def test_bridge_fit_takes_the_batches_of_host_data(accelerator) -> None:
    def trained():
        keras.utils.set_random_seed(0)
        model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
        model.compile("adam", "mse", weighted_metrics=["mae"])
        x, weights = X.astype(np.float32), np.linspace(0, 1, 22)
        how = {"sample_weight": weights, "validation_split": 0.2, "epochs": 3}
        history = bridge.fit(model, x, Y, batch_size=4, verbose=0, **how)
        evaluated = bridge.evaluate(model, x, Y, batch_size=5, verbose=0)
        return digest([np.asarray(w) for w in model.get_weights()]), history.history, evaluated

    expected = trained()
    taken = accelerator(2**30)
    assert trained() == expected
    assert len(taken) > 10


def test_large_and_memory_mapped_arrays_of_bridge_fit_are_not_read_as_a_whole(
    accelerator, monkeypatch, tmp_path
) -> None:
    np.save(tmp_path / "x.npy", X.astype(np.float32))
    read: list[object] = []
    monkeypatch.setattr(ArrayBatches, "all", read.append)
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    accelerator(2**30)
    bridge.fit(model, np.load(tmp_path / "x.npy", mmap_mode="r"), Y, verbose=0)
    accelerator(1000)
    with pytest.warns(UserWarning, match="x: the arrays take") as warned:
        bridge.fit(model, X.astype(np.float32), Y, epochs=3, verbose=0)
    assert not read
    assert len(warned) == 1


def test_data_of_predictions_stay_on_the_host(accelerator) -> None:
    x = X.astype(np.float32)
    state = ft.TrainState.create(params={"w": jnp.zeros((4, 1))}, tx=TX)
    apply = lambda params, rest, x, **_: ft.ModelOutput(x @ params["w"], rest)  # noqa: E731
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
    taken = accelerator(2**30)
    ft.predict(state, ft.predict_step(ft.Model(None, apply)), ft.ArrayLoader(x, 4))
    bridge.predict(model, x, batch_size=4, verbose=0)
    assert not taken
