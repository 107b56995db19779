"""Programs in jax's compilation cache, and jax's settings afterwards."""

import pathlib
from typing import Any

import jax
import jax.numpy as jnp
import keras
import numpy as np
import optax
import pytest

import bridge
import functrain as ft
from functrain.engine._cache import compilation_cache

OPTIONS = (
    "jax_compilation_cache_dir",
    "jax_persistent_cache_min_compile_time_secs",
    "jax_persistent_cache_min_entry_size_bytes",
)
BATCH = np.ones(8, np.float32)


def settings() -> list[Any]:
    return [getattr(jax.config, name) for name in OPTIONS]


def step(state: Any, batch: Any) -> Any:
    return state + jnp.mean(batch), {}


def test_files_are_written_and_the_settings_of_jax_stay(tmp_path: pathlib.Path) -> None:
    before, directory = settings(), tmp_path / "programs"
    count = ft.inspect.precompile(
        jnp.zeros(3), step, BATCH, target=ft.target(), directory=directory, fuse=3
    )
    assert count == len(list(directory.iterdir())) > 0
    assert any(path.name.startswith("jit_run") for path in directory.iterdir())
    assert settings() == before


def test_a_program_that_was_compiled_before_is_written_as_well(tmp_path: pathlib.Path) -> None:
    arguments = jnp.zeros(4), step, BATCH
    ft.inspect.memory(*arguments, target=ft.target(), fuse=5)
    for name in ("first", "second"):
        directory = tmp_path / name
        ft.inspect.precompile(*arguments, target=ft.target(), directory=directory, fuse=5)
        assert any(path.name.startswith("jit_run") for path in directory.iterdir())


def programs(directory: pathlib.Path) -> list[str]:
    return sorted(path.name for path in directory.glob("jit_run*-cache"))


def loss_fn(params: Any, model_state: Any, batch: Any, *, rng: Any, training: bool) -> Any:
    x, y = batch
    outputs = x @ params["w"]
    loss = optax.softmax_cross_entropy_with_integer_labels(outputs, y).mean()
    return loss, ft.Aux(model_state, outputs=outputs)


X, Y = np.ones((60, 8), np.float32), np.zeros(60, np.int32)


@pytest.mark.parametrize("placement", ["one device", "replicated", "fsdp"])
def test_a_fit_finds_its_program_in_the_cache(placement: str, tmp_path: pathlib.Path) -> None:
    tx, target = optax.adam(1e-3), ft.target()
    step = ft.train_step(loss_fn, tx, metrics={"accuracy": ft.metrics.accuracy()})
    state = ft.TrainState.create(params={"w": jnp.ones((8, 4))}, tx=tx)
    mesh = None if placement == "one device" else target.mesh({"data": -1})
    if placement == "fsdp":
        rule = ft.sharding.fsdp(min_size=8)
        state = jax.device_put(state, ft.sharding.shardings(state, mesh, rule))
    ft.inspect.precompile(
        state,
        step,
        (X[:10], Y[:10]),
        target=target,
        directory=tmp_path,
        fuse=3,
        sharding=mesh,
    )
    before = programs(tmp_path)
    with compilation_cache(tmp_path):
        ft.fit(state, step, ft.ArrayLoader((X, Y), 10), epochs=1, fuse=3, sharding=mesh, verbose=0)
    assert len(before) == 1
    assert programs(tmp_path) == before


def test_a_fit_of_a_keras_model_finds_its_program_in_the_cache(tmp_path: pathlib.Path) -> None:
    model = keras.Sequential([keras.Input((8,)), keras.layers.Dense(4)])
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile("adam", loss, metrics=["accuracy"])
    batch = X[:10], Y[:10]
    state, step = bridge.keras_state(model, batch), bridge.train_step(model)
    ft.inspect.precompile(state, step, batch, target=ft.target(), directory=tmp_path, fuse=3)
    before = programs(tmp_path)
    with compilation_cache(tmp_path):
        bridge.fit(model, X, Y, batch_size=10, fuse=3, verbose=0)
    assert len(before) == 1
    assert programs(tmp_path) == before


def test_the_settings_of_jax_stay_if_it_fails(tmp_path: pathlib.Path) -> None:
    before = settings()
    with pytest.raises(TypeError, match="target: expected a target"):
        ft.inspect.precompile(
            jnp.zeros(3),
            step,
            BATCH,
            target="tpu:v5e",  # type: ignore[arg-type]
            directory=tmp_path,
        )
    assert settings() == before
