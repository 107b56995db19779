"""Paths: links, directories that cannot be made, and values that are no paths."""

import contextlib
import os

import jax.numpy as jnp
import pytest

import functrain as ft
from functrain import load, save


def value(path):
    return int(load(path, like={"x": jnp.array(0)})["x"])


def put(path, number, **how):
    save(path, {"x": jnp.array(number)}, **how)


def test_overwriting_through_a_link_replaces_what_it_points_to(tmp_path) -> None:
    put(tmp_path / "run7", 1)
    os.symlink("run7", tmp_path / "latest")
    put(tmp_path / "latest", 2, overwrite=True)
    assert os.readlink(tmp_path / "latest") == "run7"
    assert value(tmp_path / "run7") == value(tmp_path / "latest") == 2
    assert sorted(os.listdir(tmp_path)) == ["latest", "run7"]


def test_a_run_goes_on_or_begins_without_a_look_at_what_is_there(tmp_path) -> None:
    for expected in (0, 1, 2):
        state = {"x": jnp.array(0)}
        with contextlib.suppress(FileNotFoundError):
            state = load(tmp_path / "c", like=state)
        assert state["x"] == expected
        save(tmp_path / "c", {"x": state["x"] + 1}, overwrite=True)


def test_a_directory_that_cannot_be_made_is_named_before_the_first_step(tmp_path) -> None:
    (tmp_path / "file").write_text("")
    taken = []

    def step(state, batch):
        taken.append(batch)
        return state, {}

    checkpointer = ft.Checkpointer(tmp_path / "file" / "run")
    with pytest.raises(NotADirectoryError, match="/file/run"):
        ft.fit(jnp.zeros(()), step, [jnp.ones(2)], checkpointer=checkpointer, verbose=0)
    assert not taken
    with pytest.raises(NotADirectoryError, match="/file/run"):
        ft.save(tmp_path / "file" / "run" / "state", jnp.zeros(()))
