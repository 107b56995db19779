"""Checkpoints in an object store: whole or absent, one writer, and a store that fails is no damage.

The store is fsspec's, in memory. test_stores.py has emulations of S3 and Google's.
"""

import contextlib
import itertools
import json
import pathlib
import uuid
from collections.abc import Iterator
from typing import Any

import fsspec
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import functrain as ft
from functrain.checkpoint import _manifest, _remote
from functrain.checkpoint.__main__ import main
from functrain.checkpoint._errors import ObjectStoreError
from tests.conftest import digest

STORE = fsspec.filesystem("memory")
LIKE = {"x": np.zeros(3, int)}


@pytest.fixture
def url() -> Iterator[str]:
    name = f"memory://bucket-{uuid.uuid4().hex}"
    yield f"{name}/run"
    with contextlib.suppress(FileNotFoundError):
        STORE.rm(name, recursive=True)


def state(number: int) -> dict[str, Any]:
    return {"x": np.full(3, number)}


def saved(url: str, *steps: int, **options: Any) -> ft.Checkpointer:
    with ft.Checkpointer(url, **options) as checkpoints:
        for step in steps:
            checkpoints.save(state(step), step, values={"loss": step % 4})
    return checkpoints


def objects(url: str) -> list[str]:
    """The objects of a run, without the ids of saves."""
    root = STORE._strip_protocol(url)
    names = (name.removeprefix(f"{root}/") for name in STORE.find(url))
    return sorted(name.partition("-")[0] if "arrays" in name else name for name in names)


def whole(*steps: int) -> list[str]:
    """What `objects` returns if there is nothing but complete checkpoints."""
    folders = [f"{step:012d}" for step in steps]
    names = [f"{folder}/{name}" for folder in folders for name in ("arrays", "checkpoint.json")]
    return [".functrain-writer", *names]


class Faulty:
    """A store whose operations go through a function, which may raise, before or after them."""

    def __init__(self, tell: Any, *, after: bool) -> None:
        self._tell, self._after = tell, after

    def __getattr__(self, name: str) -> Any:
        method = getattr(STORE, name)
        if name.startswith("_"):
            return method

        def act(*args: Any, **options: Any) -> Any:
            if not self._after:
                self._tell(name, args[0])
            result = method(*args, **options)
            if self._after:
                self._tell(name, args[0])
            return result

        return act


@contextlib.contextmanager
def faulty(tell: Any, *, after: bool = False) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_remote, "_file_system", lambda *_: Faulty(tell, after=after))
        yield


def test_checkpoints_are_saved_restored_replaced_and_removed(url) -> None:
    with ft.Checkpointer(url, keep=2, keep_every=4, monitor="loss") as checkpoints:
        for step in (1, 2, 2, 3, 4, 5, 6, 7):
            checkpoints.save(state(step), step, values={"loss": abs(step - 3)})
        assert checkpoints.steps() == [3, 4, 6, 7]
        assert (checkpoints.latest(), checkpoints.best()) == (7, 3)
        for step in checkpoints.steps():
            found = checkpoints.restore(LIKE, step)
            assert np.all(found.state["x"] == step)
            assert found.position.step == step
        assert checkpoints.verify() == {}
        assert objects(url) == whole(3, 4, 6, 7)
        checkpoints.rollback(4)
        checkpoints.save(state(5), 5)
        assert objects(url) == whole(3, 4, 5)
    assert repr(checkpoints).startswith(f"Checkpointer(directory={url!r}")


def test_one_state_is_saved_replaced_and_loaded(url) -> None:
    ft.save(url, state(1))
    with pytest.raises(FileExistsError, match="expected no such path, got a checkpoint"):
        ft.save(url, state(2))
    ft.save(f"{url}/", state(2), overwrite=True)
    assert np.all(ft.load(url, LIKE)["x"] == 2)
    assert objects(url) == ["arrays", "checkpoint.json"]
    warm = ft.warm_start({**LIKE, "y": np.ones(1)}, url)
    assert warm.missing == ("y",)
    assert np.all(warm.state["x"] == 2)
    with pytest.raises(FileNotFoundError, match="expected a checkpoint, got nothing"):
        ft.load(f"{url}/other", LIKE)
    STORE.pipe_file(f"{url}/model.safetensors", b"")
    with pytest.raises(ft.CheckpointMismatchError, match="from disk only: download it"):
        ft.warm_start(state(0), f"{url}/model.safetensors")


def test_a_copy_on_disk_is_a_checkpoint_and_so_is_one_that_was_uploaded(url, tmp_path) -> None:
    saved(url, 1, 2)
    STORE.get(url, str(tmp_path), recursive=True)
    local = ft.Checkpointer(next(tmp_path.rglob(f"{2:012d}")).parent)
    assert local.verify() == {}
    assert np.all(local.restore(LIKE).state["x"] == 2)
    ft.save(tmp_path / "c", state(3))
    for path in (tmp_path / "c").iterdir():
        STORE.put_file(str(path), f"{url}-up/{path.name}")
    assert np.all(ft.load(f"{url}-up", LIKE)["x"] == 3)
    ft.save(f"{url}-up", state(4), overwrite=True)
    assert objects(f"{url}-up") == ["arrays", "checkpoint.json"]


class Killed(BaseException):
    """A kill: nothing catches it."""


def live(url: str, moment: int) -> tuple[int, bool]:
    """Saves until its process is killed; returns the last step that was saved, and if it was."""
    left, last = iter(range(moment)), 1

    def die(*_: Any) -> None:
        if next(left, None) is None:
            raise Killed

    with faulty(die):
        try:
            checkpoints = ft.Checkpointer(url, keep=1)
            for version, step in ((10, 1), (20, 2), (21, 2)):
                checkpoints.save(state(version), step)
                last = version
        except Killed:
            return last, True
    return last, False


def test_a_kill_at_any_moment_leaves_whole_checkpoints_and_what_was_saved(url) -> None:
    for moment in itertools.count():
        place = f"{url}/{moment}"
        saved(place, 1)
        last, is_killed = live(place, moment)
        checkpoints = ft.Checkpointer(place, keep=1)
        assert checkpoints.verify() == {}
        found = checkpoints.restore(LIKE)
        number = int(found.state["x"][0])
        assert number in {1: (1, 10), 10: (10, 20), 20: (20, 21), 21: (21,)}[last]
        assert np.all(found.state["x"] == number)
        assert found.position.step == max(1, number // 10)
        # The next writer deletes what no manifest names.
        checkpoints.save(state(3), 3)
        checkpoints.close()
        assert objects(place) == whole(3)
        if not is_killed:
            break
    assert moment > 20


def test_a_state_is_saved_where_a_save_was_killed(url) -> None:
    for moment in itertools.count():
        place, left = f"{url}/{moment}", iter(range(moment))

        def die(*_: Any, left: Iterator[int] = left) -> None:
            if next(left, None) is None:
                raise Killed

        with faulty(die), contextlib.suppress(Killed):
            ft.save(place, state(1))
            break
        # The manifest is the last object: until it is there, nothing is.
        if "checkpoint.json" not in objects(place):
            with pytest.raises(FileNotFoundError, match="expected a checkpoint, got nothing"):
                ft.load(place, LIKE)
        with contextlib.suppress(FileExistsError):  # it was killed after the manifest
            ft.save(place, state(1))
        assert np.all(ft.load(place, LIKE)["x"] == 1)
        assert objects(place) == ["arrays", "checkpoint.json"]
    assert moment > 3


def test_the_newest_writer_replaces_the_one_before_which_is_told_so(url) -> None:
    first, second = ft.Checkpointer(url), ft.Checkpointer(url)
    first.save(state(1), 1)
    assert second.restore(LIKE).position.step == 1  # reading takes nothing over
    first.save(state(2), 2)
    second.save(state(3), 3)
    told = rf"{url}: expected to be the only writer.*but process \d+ on \S+ has taken over at 20"
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
    assert objects(url) == whole(2, 3, 4)


def test_a_writer_that_is_replaced_during_its_save_commits_nothing(url) -> None:
    first = ft.Checkpointer(url)
    first.save(state(1), 1)
    others = iter([ft.Checkpointer(url)])

    def take_over(name: str, path: str) -> None:
        if name == "open" and "arrays" in path:
            for other in others:
                other.save(state(5), 5)

    with faulty(take_over), pytest.raises(RuntimeError, match="has taken over"):
        first.save(state(2), 2)
    assert first.steps() == [1, 5]
    saved(url, 6)
    assert objects(url) == whole(1, 5, 6)


def test_arrays_that_another_program_deleted_are_not_committed(url) -> None:
    def delete(name: str, path: str) -> None:
        if name == "find" and path == url:
            for found in STORE.glob(f"{url}/arrays-*"):
                STORE.rm_file(found)

    with faulty(delete), pytest.raises(RuntimeError, match="have been deleted"):
        ft.save(url, state(1))
    assert objects(url) == []


def test_a_directory_that_is_deleted_during_a_run_is_written_again(url) -> None:
    with ft.Checkpointer(url) as checkpoints:
        checkpoints.save(state(1), 1)
        STORE.rm(url, recursive=True)
        checkpoints.save(state(2), 2)
    assert objects(url) == whole(2)


def train(url: str, *, until: int | None = None) -> Any:
    def loss_fn(params, model_state, batch, *, rng, training):  # type: ignore[no-untyped-def]
        return jnp.mean((batch @ params["w"]) ** 2), ft.Aux(model_state)

    def stop(event: Any) -> None:
        if event.step == until:
            raise ZeroDivisionError

    tx = optax.adam(0.1)
    start = ft.TrainState.create(params={"w": jnp.ones(4)}, tx=tx, rng=jax.random.key(0))
    loader = ft.ArrayLoader(np.random.default_rng(0).normal(size=(12, 4)).astype("f4"), 4)
    return ft.fit(
        start,
        ft.train_step(loss_fn, tx),
        loader,
        epochs=3,
        checkpointer=ft.Checkpointer(url, every=2),
        hooks=[stop],
        fuse=1,
        verbose=0,
    )


def test_a_fit_resumes_and_passes_over_a_damaged_checkpoint(url) -> None:
    expected = train(f"{url}-straight")
    with pytest.raises(ZeroDivisionError):
        train(url, until=7)
    latest = ft.Checkpointer(url).latest()
    arrays = STORE.glob(f"{url}/{latest:012d}/arrays-*")[0]
    STORE.pipe_file(arrays, STORE.cat_file(arrays)[:-1] + b"?")
    with pytest.warns(UserWarning, match="Passed over, for step 4"):
        result = train(url)
    assert digest(result.state) == digest(expected.state)
    # It is set aside, as it was.
    assert any(f"damaged-{latest:012d}/arrays" in name for name in STORE.find(url))
    assert ft.Checkpointer(url).verify() == {}
    assert digest(train(url).state) == digest(expected.state)


def test_an_object_that_is_missing_or_damaged_is_named(url) -> None:
    checkpoints = saved(url, 1, 2, 3)
    gone, cut = (STORE.glob(f"{url}/{step:012d}/arrays-*")[0] for step in (1, 2))
    STORE.rm_file(gone)
    STORE.pipe_file(cut, STORE.cat_file(cut)[:-8])
    damage = checkpoints.verify()
    assert list(damage) == [1, 2]
    assert "arrays-0-" in damage[1]
    assert "x: int64[3]: no such object" in damage[1]
    assert "cut short" in damage[2]
    assert main([url, "--verify"]) == 1


def test_a_store_that_cannot_be_written_is_told_before_the_first_step(url) -> None:
    def refuse(name: str, path: str) -> None:
        if name in ("pipe_file", "open"):
            raise PermissionError("AccessDenied")

    taken = []

    def step(state: Any, batch: Any) -> Any:
        taken.append(batch)
        return state, {}

    with faulty(refuse), pytest.raises(ObjectStoreError, match=r"run/.*AccessDenied.*permissions"):
        ft.fit(jnp.zeros(()), step, [np.ones(2)], checkpointer=ft.Checkpointer(url), verbose=0)
    assert taken == []


def test_a_store_that_cannot_be_reached_is_not_taken_for_a_damaged_checkpoint(url) -> None:
    checkpoints = saved(url, 1, 2)
    for broken in ("find", "info", "open"):

        def fail(name: str, path: str, broken: str = broken) -> None:
            if name == broken:
                raise OSError("connection reset by peer")

        with faulty(fail), pytest.raises(ObjectStoreError, match="connection reset"):
            checkpoints.restore(LIKE)
        with faulty(fail), pytest.raises(ObjectStoreError, match="connection reset"):
            checkpoints.verify()
    assert checkpoints.verify() == {}


def test_what_a_failed_save_left_is_deleted_by_the_next_writer(url) -> None:
    checkpoints = saved(url, 1)

    def fail(name: str, path: str) -> None:
        if name == "pipe_file" and path.endswith("checkpoint.json"):
            raise OSError("quota")

    for step in (1, 2):
        with faulty(fail), pytest.raises(ObjectStoreError, match="quota"):
            checkpoints.save(state(9), step)
        assert checkpoints.steps() == [1]
        assert np.all(checkpoints.restore(LIKE).state["x"] == 1)
    checkpoints.close()
    saved(url, 3)
    assert objects(url) == whole(1, 3)


def test_a_manifest_that_was_stored_although_its_upload_failed_keeps_its_arrays(url) -> None:
    checkpoints = saved(url, 1)

    def fail(name: str, path: str) -> None:
        if name == "pipe_file" and path.endswith("checkpoint.json"):
            raise TimeoutError

    with faulty(fail, after=True), pytest.raises(ObjectStoreError, match="TimeoutError"):
        checkpoints.save(state(2), 2)
    assert checkpoints.steps() == [1, 2]
    assert checkpoints.verify() == {}


def test_a_save_id_of_a_crafted_manifest_is_refused(url) -> None:
    saved(url, 1)
    path = f"{url}/{1:012d}/checkpoint.json"
    sealed = json.loads(STORE.cat_file(path))
    sealed["checkpoint"]["save_id"] = "/../../x"
    sealed["crc32"] = _manifest._checksum(sealed["checkpoint"])
    STORE.pipe_file(path, json.dumps(sealed).encode())
    with pytest.raises(ft.CheckpointCorruptError, match="its save_id is not hexadecimal"):
        ft.Checkpointer(url).restore(LIKE)


def test_the_command_lists_and_compares(url, capsys) -> None:
    saved(url, 1, 2)
    saved(f"{url}2", 2)
    assert main([url]) == 0
    assert f"{url}: 2 checkpoints" in capsys.readouterr().out
    assert main([url, f"{url}2"]) == 0
    assert "All 1 leaves are the same" in capsys.readouterr().out
    assert main([f"{url}/nothing"]) == 2


@pytest.mark.parametrize("path", ["ftp://bucket/run", "://", "s3://", "file:///tmp/run"])
def test_an_address_of_another_kind_is_refused(path, tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    for use in (
        ft.Checkpointer,
        lambda path: ft.save(path, LIKE),
        lambda path: ft.load(path, LIKE),
        lambda path: ft.warm_start(LIKE, path),
    ):
        with pytest.raises(ValueError, match=r"expected a path on this machine.* gs:// or s3://"):
            use(path)
    assert list(tmp_path.iterdir()) == []


def test_pathlib_changes_addresses_which_is_told() -> None:
    with pytest.raises(ValueError, match=r"got 'gs:/bucket/run'. pathlib removes a slash"):
        ft.Checkpointer(pathlib.Path("gs://bucket/run"))


def test_a_missing_library_is_named_at_once(monkeypatch) -> None:
    monkeypatch.setitem(_remote._PACKAGES, "gs", "a_library_that_is_missing")
    with pytest.raises(ImportError, match=r"gs:// need .*pip install 'functrain\[remote\]'"):
        ft.Checkpointer("gs://bucket/run")
