"""Programs in jax's compilation cache, and jax's settings afterwards."""

import pathlib
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import functrain as ft

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
