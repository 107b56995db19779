"""On disk and in an object store: whole or absent, whatever is killed, fails or is replaced."""

import contextlib
import itertools
from typing import Any

import fsspec
import numpy as np
import pytest

import functrain as ft
from functrain.checkpoint import _checkpoint, _files
from functrain.checkpoint.__main__ import main
from tests.checkpoint.storages import (
    Killed,
    array_file,
    change,
    files,
    killed_at,
    telling,
    train,
    whole,
)
from tests.conftest import digest

LIKE = {"x": np.zeros(3, int)}


def state(number: int) -> dict[str, Any]:
    return {"x": np.full(3, number)}


def value(place: str) -> int:
    (number,) = set(ft.load(place, LIKE)["x"].tolist())
    return int(number)


def saved(place: str, *steps: int, **options: Any) -> ft.Checkpointer:
    with ft.Checkpointer(place, **options) as checkpoints:
        for step in steps:
            checkpoints.save(state(step), step, values={"loss": step % 4})
    return checkpoints


def test_checkpoints_are_saved_restored_replaced_and_removed(place) -> None:
    with ft.Checkpointer(place, keep=2, keep_every=4, monitor="loss") as checkpoints:
        for step in (1, 2, 2, 3, 4, 5, 6, 7):
            checkpoints.save(state(step), step, values={"loss": abs(step - 3)})
        assert checkpoints.steps() == [3, 4, 6, 7]
        assert (checkpoints.latest(), checkpoints.best()) == (7, 3)
        for step in checkpoints.steps():
            found = checkpoints.restore(LIKE, step)
            assert np.all(found.state["x"] == step)
            assert found.position.step == step
        assert checkpoints.verify() == {}
        assert files(place) == whole(3, 4, 6, 7)
        checkpoints.rollback(4)
        checkpoints.save(state(5), 5)
        assert files(place) == whole(3, 4, 5)
    assert repr(checkpoints).startswith(f"Checkpointer(directory={place!r}")


def test_one_state_is_saved_replaced_and_loaded(place) -> None:
    ft.save(place, state(1))
    with pytest.raises(FileExistsError, match=r"expected no such path, .* got an existing one"):
        ft.save(place, state(2))
    ft.save(f"{place}/", state(2), overwrite=True)
    assert value(place) == 2
    assert files(place) == ["arrays", "checkpoint.json"]
    warm = ft.warm_start({**LIKE, "y": np.ones(1)}, place)
    assert warm.missing == ("y",)
    assert np.all(warm.state["x"] == 2)
    with pytest.raises(FileNotFoundError, match="expected a checkpoint, got nothing"):
        ft.load(f"{place}/other", LIKE)


def test_who_loads_the_directory_of_a_checkpointer_is_told_its_steps(place) -> None:
    saved(place, 3, 40, keep=None)
    told = r"got the directory of a Checkpointer.* steps 3, 40\. .*, or .* Checkpointer\.restore"
    with pytest.raises(ft.CheckpointMismatchError, match=told):
        ft.load(place, LIKE)


def test_a_copy_in_another_storage_is_a_checkpoint(tmp_path, url) -> None:
    store = fsspec.filesystem("memory")
    saved(url, 1, 2)
    store.get(url, str(tmp_path / "down"), recursive=True)
    local = ft.Checkpointer(next(tmp_path.rglob(f"{2:012d}")).parent)
    assert local.verify() == {}
    assert np.all(local.restore(LIKE).state["x"] == 2)
    ft.save(tmp_path / "c", state(3))
    store.put(str(tmp_path / "c"), f"{url}-up", recursive=True)
    assert value(f"{url}-up") == 3
    ft.save(f"{url}-up", state(4), overwrite=True)
    assert files(f"{url}-up") == ["arrays", "checkpoint.json"]


def live(place: str, moment: int) -> tuple[int, bool]:
    """Saves until its process is killed; returns the last value that was saved, and if it was."""
    last, checkpoints = 1, ft.Checkpointer(place, keep=1)
    with killed_at(moment):
        try:
            for version, step in ((10, 1), (20, 2), (21, 2)):
                checkpoints.save(state(version), step)
                last = version
        except Killed:
            return last, True
        finally:
            checkpoints._lock.release()
    return last, False


def test_a_kill_at_any_moment_leaves_whole_checkpoints_and_what_was_saved(place) -> None:
    for moment in itertools.count():
        run = f"{place}/{moment}"
        saved(run, 1)
        last, is_killed = live(run, moment)
        checkpoints = ft.Checkpointer(run, keep=1)
        assert checkpoints.verify() == {}
        found = checkpoints.restore(LIKE)
        number = int(found.state["x"][0])
        assert number in {1: (1, 10), 10: (10, 20), 20: (20, 21), 21: (21,)}[last]
        assert np.all(found.state["x"] == number)
        assert found.position.step == max(1, number // 10)
        # The next writer deletes what no manifest names.
        checkpoints.save(state(3), 3)
        checkpoints.close()
        assert files(run) == whole(3)
        if not is_killed:
            break
    assert moment > 20


@pytest.mark.parametrize("before", [False, True], ids=["new", "replaced"])
def test_one_state_is_saved_where_a_save_was_killed(place, before) -> None:
    for moment in itertools.count():
        path, is_killed = f"{place}/{moment}", True
        if before:
            ft.save(path, state(1))
        with killed_at(moment), contextlib.suppress(Killed):
            ft.save(path, state(2), overwrite=True)
            is_killed = False
        # The manifest comes last: until it is there, nothing is.
        if "checkpoint.json" in files(path):
            assert value(path) in ((1, 2) if before else (2,))
        else:
            with pytest.raises(FileNotFoundError, match="expected a checkpoint, got nothing"):
                ft.load(path, LIKE)
        ft.save(path, state(3), overwrite=True)
        assert value(path) == 3
        assert files(path) == ["arrays", "checkpoint.json"]
        if not is_killed:
            break
    assert moment > 3


@pytest.mark.parametrize("before", [[], ["arrays", "checkpoint.json"]], ids=["new", "replaced"])
def test_a_save_that_fails_leaves_what_was_there_and_nothing_else(
    place, before, monkeypatch
) -> None:
    def full_disk(file: Any, *_: Any) -> None:
        file.write(b"half of it")
        raise OSError("no space left")

    if before:
        ft.save(place, state(1))
    with monkeypatch.context() as patch:
        patch.setattr(_checkpoint, "write_arrays", full_disk)
        with pytest.raises((OSError, RuntimeError), match="no space left"):
            ft.save(place, state(2), overwrite=True)
    assert files(place) == before
    assert not before or value(place) == 1


def test_a_failed_save_is_cleaned_up_by_the_next_writer(place) -> None:
    checkpoints = saved(place, 1)

    def fail(name: str, path: str) -> None:
        if name in ("pipe_file", "replace") and "checkpoint.json" in path:
            raise OSError("quota")

    for step in (1, 2):
        with telling(fail), pytest.raises((OSError, RuntimeError), match="quota"):
            checkpoints.save(state(9), step)
        assert checkpoints.steps() == [1]
        assert np.all(checkpoints.restore(LIKE).state["x"] == 1)
    checkpoints.close()
    saved(place, 3)
    assert files(place) == whole(1, 3)


def test_a_manifest_that_was_stored_although_writing_it_failed_keeps_its_arrays(place) -> None:
    checkpoints = saved(place, 1)

    def fail(name: str, path: str) -> None:
        if name in ("pipe_file", "replace") and "checkpoint.json" in path:
            raise TimeoutError

    with telling(fail, after=True), pytest.raises((OSError, RuntimeError)):
        checkpoints.save(state(2), 2)
    assert checkpoints.steps() == [1, 2]
    assert checkpoints.verify() == {}


def test_arrays_that_another_program_deleted_are_not_committed(place, monkeypatch) -> None:
    monkeypatch.setattr(type(_files.files_at(place)), "has", lambda *_: False)
    with pytest.raises(RuntimeError, match="no other program writes to"):
        ft.save(place, state(1))
    assert files(place) == []


def test_a_directory_that_is_deleted_during_a_run_is_written_again(place) -> None:
    with ft.Checkpointer(place) as checkpoints:
        checkpoints.save(state(1), 1)
        fsspec.core.url_to_fs(place)[0].rm(place, recursive=True)
        assert checkpoints.steps() == []
        checkpoints.save(state(2), 2)
    assert files(place) == whole(2)


def test_a_fit_resumes_and_sets_a_damaged_checkpoint_aside(place) -> None:
    @ft.at(7)
    def fail(event: Any) -> None:
        raise ZeroDivisionError

    expected = train(f"{place}-straight")
    with pytest.raises(ZeroDivisionError):
        train(place, fail)
    latest = ft.Checkpointer(place).latest()
    change(array_file(f"{place}/{latest:012d}"), lambda content: content[:-1] + b"?")
    with pytest.warns(UserWarning, match="Passed over, for step 4"):
        result = train(place)
    assert digest((result.state, result.history.steps)) == digest(
        (expected.state, expected.history.steps)
    )
    # It is set aside, as it was.
    damaged = [name for name in files(place) if name.startswith("damaged-")]
    assert damaged == [f"damaged-{latest:012d}/{name}" for name in ("arrays", "checkpoint.json")]
    assert ft.Checkpointer(place).verify() == {}
    assert digest(train(place).state) == digest(expected.state)


def test_arrays_that_are_missing_or_damaged_are_named(place) -> None:
    checkpoints = saved(place, 1, 2, 3)
    lost, cut = (array_file(f"{place}/{step:012d}") for step in (1, 2))
    fsspec.core.url_to_fs(lost)[0].rm(lost)
    change(cut, lambda content: content[:-8])
    damage = checkpoints.verify()
    assert list(damage) == [1, 2]
    assert "expected the bytes of x as saved" in damage[1]
    assert "its file is missing" in damage[1]
    assert "cut short" in damage[2]
    assert main([place, "--verify"]) == 1
