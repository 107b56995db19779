"""Paths: `~` is the home directory in every argument that names a place."""

import os
import pathlib
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

import functrain as ft
from functrain.checkpoint.__main__ import main
from functrain.common._paths import absolute_path
from functrain.distributed import _launch

from ..conftest import compilation_cache

STATE = {"w": jnp.ones(2)}


def fit(*hooks: Any) -> None:
    data = ft.ArrayLoader(np.ones(4, np.float32), 2)
    ft.fit(0.0, lambda s, b: (s + b.sum(), {"loss": s}), data, hooks=hooks, verbose=0)


def use_cache(place: str) -> None:
    with compilation_cache(place):
        pass


WRITERS: dict[str, Callable[[str], object]] = {
    "save": lambda place: ft.save(place, STATE),
    "Checkpointer": lambda place: ft.Checkpointer(pathlib.Path(place)).save(STATE, 1),
    "params": lambda place: ft.export.params(f"{place}/p.safetensors", STATE),
    "predict": lambda place: ft.export.predict(place, 1.0, lambda s, x: (s, s * x), jnp.ones(2)),
    "CSVLogger": lambda place: fit(ft.hooks.CSVLogger(f"{place}/log.csv")),
    "JSONLines": lambda place: fit(ft.hooks.JSONLines(place)),
    "TensorBoard": lambda place: fit(ft.hooks.TensorBoard(place)),
    "Profile": lambda place: fit(ft.hooks.Profile(place, start=1, steps=1)),
    "Sample": lambda place: fit(ft.hooks.Sample(lambda state: "text", directory=place)),
    "cache": use_cache,
}


@pytest.fixture
def home(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> pathlib.Path:
    """An empty home directory, and an empty working directory beside it."""
    for name in ("home", "work"):
        (tmp_path / name).mkdir()
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.chdir(tmp_path / "work")
    return tmp_path / "home"


@pytest.mark.parametrize("name", WRITERS)
def test_what_is_written_to_a_tilde_lies_in_the_home_directory(name, home) -> None:
    WRITERS[name]("~/deep/place")
    assert (home / "deep" / "place").exists()
    assert not os.listdir()


def test_what_is_read_from_a_tilde_lies_in_the_home_directory(home, capsys) -> None:
    ft.save(home / "run", {"w": jnp.arange(2.0)})
    assert ft.load("~/run", STATE)["w"].tolist() == [0, 1]
    assert ft.warm_start(STATE, pathlib.Path("~/run")).state["w"].tolist() == [0, 1]
    assert main(["~/run"]) == 0
    assert "1 not verified" in capsys.readouterr().out


def test_a_script_in_the_home_directory_is_launched(home, capfd) -> None:
    (home / "script.py").write_text("print('hello')")
    assert _launch.main(["-n", "1", "~/script.py"]) == 0
    assert "hello" in capfd.readouterr().out


def test_a_path_stays_where_it_was_when_the_working_directory_changes(home, monkeypatch) -> None:
    log = ft.hooks.CSVLogger("log.csv")
    monkeypatch.chdir(home)
    fit(log)
    assert log.path == home.parent / "work" / "log.csv"
    assert log.path.exists()


@pytest.mark.parametrize(
    ("path", "error", "message"),
    [
        (None, TypeError, "place: expected a path, such as 'runs/first', got None"),
        (b"runs", TypeError, "place: expected a path"),
        ("", ValueError, "place: expected a path that is not empty"),
        ("a\0b", ValueError, "null character"),
        ("gs://bucket/log", ValueError, "place: expected a path on this machine.*gs://bucket/log"),
    ],
)
def test_what_is_no_path_on_this_machine_is_refused_by_its_name(path, error, message) -> None:
    with pytest.raises(error, match=message):
        absolute_path(path, "place")
