"""A checkpoint that replaces another: killed at any moment, one of the two is found."""

import contextlib
import os
import shutil
import types

import jax.numpy as jnp
import pytest

import functrain as ft
from functrain import load, save
from functrain.checkpoint import _local, _storage


def value(path):
    return int(load(path, like={"x": jnp.array(0)})["x"])


def put(path, number, **how):
    save(path, {"x": jnp.array(number)}, **how)


class Killed(BaseException):
    """A kill: nothing catches it."""


def kill_at(monkeypatch, moment):
    """Lets the process die before the given one of the exchange's operations on directories."""
    left = iter(range(moment))

    def mortal(operation):
        def act(*args, **kwargs):
            if next(left, None) is None:
                raise Killed
            return operation(*args, **kwargs)

        return act

    names = types.SimpleNamespace(**{**vars(os), "rename": mortal(os.rename)})
    monkeypatch.setattr(_local, "os", names)
    monkeypatch.setattr(_local, "shutil", types.SimpleNamespace(rmtree=mortal(shutil.rmtree)))


def find_value(path):
    with contextlib.ExitStack() as stack:
        if not path.exists():
            stack.enter_context(pytest.warns(UserWarning, match="expected a checkpoint, got noth"))
        return value(path)


@pytest.mark.parametrize("moment", range(6))
def test_a_save_killed_at_any_moment_of_the_exchange_leaves_one_that_is_found(
    tmp_path, monkeypatch, moment
) -> None:
    put(tmp_path / "c", 1)
    with monkeypatch.context() as patch:
        kill_at(patch, moment)
        with contextlib.suppress(Killed):
            put(tmp_path / "c", 2, overwrite=True)
    assert find_value(tmp_path / "c") in (1, 2)
    put(tmp_path / "c", 3, overwrite=True)
    assert value(tmp_path / "c") == 3
    assert os.path.isdir(tmp_path / "c")
    assert not os.path.lexists(tmp_path / "c.functrain-old")


def test_ctrl_c_in_the_midst_of_the_exchange_leaves_the_one_before(tmp_path, monkeypatch) -> None:
    put(tmp_path / "c", 1)

    def rename(old, new):
        if new == str(tmp_path / "c") and old.endswith(".functrain-new"):
            raise KeyboardInterrupt
        os.rename(old, new)

    names = types.SimpleNamespace(**{**vars(os), "rename": rename})
    monkeypatch.setattr(_local, "os", names)
    with pytest.raises(KeyboardInterrupt):
        put(tmp_path / "c", 2, overwrite=True)
    assert value(tmp_path / "c") == 1
    assert os.listdir(tmp_path) == ["c"]


def test_the_kept_checkpoint_is_loaded_with_a_warning_that_says_so(tmp_path) -> None:
    put(tmp_path / "c", 1)
    os.rename(tmp_path / "c", tmp_path / "c.functrain-old")
    with pytest.warns(UserWarning, match=r"c: expected .* interrupted .*c\.functrain-old") as found:
        assert value(tmp_path / "c") == 1
    assert found[0].filename == __file__


def test_saving_again_does_not_delete_the_only_checkpoint_before_another_is_whole(
    tmp_path, monkeypatch
) -> None:
    def full_disk(*args, **kwargs):
        raise OSError("no space left on device")

    put(tmp_path / "c", 1)
    os.rename(tmp_path / "c", tmp_path / "c.functrain-old")
    with monkeypatch.context() as patch:
        patch.setattr(_storage, "write_arrays", full_disk)
        with pytest.raises(OSError, match="no space"):
            put(tmp_path / "c", 2, overwrite=True)
    assert value(tmp_path / "c") == 1


def test_what_was_kept_beside_a_checkpoint_in_its_place_is_not_looked_at(tmp_path) -> None:
    put(tmp_path / "c.functrain-old", 1)
    put(tmp_path / "c", 2)
    assert value(tmp_path / "c") == 2
    put(tmp_path / "c", 3, overwrite=True)
    assert os.listdir(tmp_path) == ["c"]


def test_overwriting_through_a_link_replaces_what_it_points_to(tmp_path) -> None:
    put(tmp_path / "run7", 1)
    os.symlink("run7", tmp_path / "latest")
    put(tmp_path / "latest", 2, overwrite=True)
    assert os.readlink(tmp_path / "latest") == "run7"
    assert value(tmp_path / "run7") == value(tmp_path / "latest") == 2
    assert sorted(os.listdir(tmp_path)) == ["latest", "run7"]


def test_a_checkpoint_kept_behind_a_link_is_found(tmp_path) -> None:
    put(tmp_path / "run7", 1)
    os.symlink("run7", tmp_path / "latest")
    os.rename(tmp_path / "run7", tmp_path / "run7.functrain-old")
    with pytest.warns(UserWarning, match="was kept, and is loaded"):
        assert value(tmp_path / "latest") == 1
    put(tmp_path / "latest", 2, overwrite=True)
    assert sorted(os.listdir(tmp_path)) == ["latest", "run7"]


def test_a_run_goes_on_or_begins_without_a_look_at_what_is_there(tmp_path) -> None:
    for expected in (0, 1, 2):
        state = {"x": jnp.array(0)}
        with contextlib.suppress(FileNotFoundError):
            state = load(tmp_path / "c", like=state)
        assert state["x"] == expected
        save(tmp_path / "c", {"x": state["x"] + 1}, overwrite=True)


@pytest.mark.parametrize(("path", "error"), [("", ValueError), (None, TypeError), (3, TypeError)])
def test_a_path_is_a_text_or_a_path_and_not_empty(path, error) -> None:
    with pytest.raises(error, match=f"directory: expected a path.* got {path!r}"):
        ft.Checkpointer(path)
    for call in (lambda: ft.save(path, {}), lambda: ft.load(path, {})):
        with pytest.raises(error, match=f"path: expected a path.* got {path!r}"):
            call()


def test_a_directory_that_cannot_be_made_is_named_before_the_first_step(tmp_path) -> None:
    (tmp_path / "file").write_text("")
    taken = []

    def step(state, batch):
        taken.append(batch)
        return state, {}

    checkpointer = ft.Checkpointer(tmp_path / "file" / "run")
    with pytest.raises(NotADirectoryError, match=r"/run: expected a dir.*got a file at .*/file\."):
        ft.fit(jnp.zeros(()), step, [jnp.ones(2)], checkpointer=checkpointer, verbose=0)
    assert not taken
    with pytest.raises(NotADirectoryError, match=r"/run: expected a dir.*got a file at .*/file\."):
        ft.save(tmp_path / "file" / "run" / "state", jnp.zeros(()))
