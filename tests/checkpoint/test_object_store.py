"""Object stores only: the newest writer takes over, and a store that fails is no damage."""

import pathlib
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

import functrain as ft
from functrain.checkpoint import _object_store
from functrain.checkpoint._errors import ObjectStoreError
from tests.checkpoint.storages import files, telling, whole
from tests.checkpoint.test_storage import LIKE, saved, state


def test_the_newest_writer_replaces_the_one_before_which_is_told_so(url) -> None:
    first, second = ft.Checkpointer(url), ft.Checkpointer(url)
    first.save(state(1), 1)
    assert second.restore(LIKE).position.step == 1  # reading takes nothing over
    first.save(state(2), 2)
    second.save(state(3), 3)
    told = rf"{url}: expected to be the only writer.*but process \d+ on \S+ has taken over\."
    for _ in range(2):
        with pytest.raises(RuntimeError, match=told):
            first.save(state(4), 4)
        with pytest.raises(RuntimeError, match=told):
            first.rollback(1)
    assert second.steps() == [1, 2, 3]
    first.close()
    first.save(state(4), 4)  # now it is the newest
    with pytest.raises(RuntimeError, match=told):
        second.save(state(5), 5)
    assert files(url) == whole(2, 3, 4)


def test_a_writer_that_is_replaced_during_its_save_commits_nothing(url) -> None:
    first = ft.Checkpointer(url)
    first.save(state(1), 1)
    others = iter([ft.Checkpointer(url)])

    def take_over(name: str, path: str) -> None:
        if name == "open" and "arrays" in path:
            for other in others:
                other.save(state(5), 5)

    with telling(take_over), pytest.raises(RuntimeError, match="has taken over"):
        first.save(state(2), 2)
    assert first.steps() == [1, 5]
    saved(url, 6)
    assert files(url) == whole(1, 5, 6)


def test_a_store_that_cannot_be_written_is_told_before_the_first_step(url) -> None:
    def refuse(name: str, path: str) -> None:
        if name in ("pipe_file", "open"):
            raise PermissionError("AccessDenied")

    taken = []

    def step(state: Any, batch: Any) -> Any:
        taken.append(batch)
        return state, {}

    with telling(refuse), pytest.raises(ObjectStoreError, match=r"run/.*AccessDenied.*permissions"):
        ft.fit(jnp.zeros(()), step, [np.ones(2)], checkpointer=ft.Checkpointer(url), verbose=0)
    assert taken == []


def test_a_store_that_cannot_be_reached_is_not_taken_for_a_damaged_checkpoint(url) -> None:
    checkpoints = saved(url, 1, 2)
    for broken in ("find", "open"):

        def fail(name: str, path: str, broken: str = broken) -> None:
            if name == broken:
                raise OSError("connection reset by peer")

        with telling(fail), pytest.raises(ObjectStoreError, match="connection reset"):
            checkpoints.restore(LIKE)
        with telling(fail), pytest.raises(ObjectStoreError, match="connection reset"):
            checkpoints.verify()
    assert checkpoints.verify() == {}


@pytest.mark.parametrize("path", ["ftp://bucket/run", "://", "s3://", "file:///tmp/run"])
def test_an_address_of_another_kind_is_refused(path, tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    for use in (
        ft.Checkpointer,
        lambda path: ft.save(path, LIKE),
        lambda path: ft.load(path, LIKE),
    ):
        with pytest.raises(ValueError, match=r"expected a path on this machine.* gs:// or s3://"):
            use(path)
    assert list(tmp_path.iterdir()) == []


def test_pathlib_changes_addresses_which_is_told() -> None:
    with pytest.raises(ValueError, match=r"got 'gs:/bucket/run'..* removes a slash"):
        ft.Checkpointer(pathlib.Path("gs://bucket/run"))


def test_a_missing_library_is_named_at_once(monkeypatch) -> None:
    monkeypatch.setitem(_object_store.PACKAGES, "gs", "a_library_that_is_missing")
    with pytest.raises(ImportError, match=r"gs:// need .*pip install 'functrain\[remote\]'"):
        ft.Checkpointer("gs://bucket/run")
