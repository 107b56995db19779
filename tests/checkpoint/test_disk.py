"""A disk that is full, or not to be written to: said at the next call, and nothing is lost."""

import contextlib
import os
import pathlib
import resource
import subprocess
import threading
from collections.abc import Iterator
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

import functrain as ft

LIKE = {"x": np.zeros(200_000)}
NOISE = np.random.default_rng(0)


def state_of(step: int) -> dict[str, Any]:
    return {"x": NOISE.standard_normal(200_000) + step}


def mount(place: pathlib.Path, options: str) -> None:
    if not hasattr(os, "geteuid") or os.geteuid() != 0:
        pytest.skip("only root mounts a small disk")
    done = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", options, "tmpfs", place], capture_output=True, check=False
    )
    if done.returncode:
        pytest.skip(f"no disk can be mounted here: {done.stderr.decode()}")


@pytest.fixture
def small_disk(tmp_path: pathlib.Path) -> Iterator[pathlib.Path]:
    """One of 4 MiB; a checkpoint has 1.6."""
    place = tmp_path / "disk"
    place.mkdir()
    mount(place, "size=4m")
    yield place
    subprocess.run(["umount", "-l", place], check=True)


@contextlib.contextmanager
def no_room(limit: int = 100_000) -> Iterator[None]:
    """No file may become longer than this."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_a_full_disk_is_said_and_the_next_save_with_room_works(small_disk) -> None:
    checkpoints = ft.Checkpointer(small_disk / "d", keep=None)
    checkpoints.save(state_of(1), 1)
    filler = small_disk / "filler"
    filler.write_bytes(bytes(1_700_000))
    with pytest.raises(OSError, match="No space left on device"):
        checkpoints.save(state_of(2), 2)
    free = os.statvfs(small_disk)
    assert free.f_bavail * free.f_bsize > 500_000  # nothing of it is left
    checkpoints.save(state_of(3), 3, wait=False)
    with pytest.raises(OSError, match="No space left on device"):
        checkpoints.close()
    assert checkpoints.steps() == [1]
    assert checkpoints.verify() == {}
    filler.unlink()
    checkpoints.save(state_of(4), 4)
    assert checkpoints.steps() == [1, 4]
    assert checkpoints.verify() == {}
    checkpoints.close()


def test_a_life_that_was_killed_on_a_full_disk_does_not_keep_the_next_from_beginning(
    small_disk,
) -> None:
    with ft.Checkpointer(small_disk, keep=1) as checkpoints:
        checkpoints.save(state_of(1), 1)
    left = small_disk / f"{2:012d}"
    left.mkdir()
    with contextlib.suppress(OSError):
        (left / "arrays-0-ab.safetensors").write_bytes(bytes(4_000_000))
    assert os.statvfs(small_disk).f_bavail == 0
    with ft.Checkpointer(small_disk, keep=1) as checkpoints:
        checkpoints.save(state_of(2), 2)
        assert checkpoints.steps() == [2]


def test_a_write_that_fails_is_raised_no_later_than_by_the_next_call(tmp_path) -> None:
    checkpoints = ft.Checkpointer(tmp_path)
    checkpoints.save(state_of(1), 1)
    for ask in (
        lambda: checkpoints.save(state_of(3), 3),
        checkpoints.wait,
        checkpoints.close,
        lambda: checkpoints.restore(LIKE),
        checkpoints.verify,
    ):
        with no_room():
            checkpoints.save(state_of(2), 2, wait=False)
            for thread in threading.enumerate():
                if thread.name.startswith("functrain checkpoint"):
                    thread.join()
        with pytest.raises(OSError, match="too large"):
            ask()
        assert checkpoints.steps() == [1]
    checkpoints.save(state_of(2), 2)
    assert checkpoints.verify() == {}
    checkpoints.close()
    assert sorted(os.listdir(tmp_path)) == [".functrain-lock", f"{1:012d}", f"{2:012d}"]


def test_a_fit_whose_checkpoints_cannot_be_written_ends_with_the_error_and_what_it_has(
    tmp_path,
) -> None:
    def step(total: Any, batch: Any) -> Any:
        return total + batch.sum(), {"total": total[0]}

    with no_room(), pytest.raises(OSError, match="too large") as caught:
        ft.fit(
            jnp.asarray(NOISE.standard_normal(100_000, np.float32)),
            step,
            ft.ArrayLoader(np.ones(40, np.float32), 2),
            epochs=3,
            checkpointer=ft.Checkpointer(tmp_path, every=ft.every(steps=5)),
            verbose=0,
        )
    assert len(caught.value.fit_result.history.steps["total"]) >= 5  # type: ignore[attr-defined]
    assert ft.Checkpointer(tmp_path).steps() == []


def test_a_finished_fit_returns_its_result_where_nothing_can_be_written(tmp_path) -> None:
    def fit(epochs: int) -> ft.FitResult:
        return ft.fit(
            jnp.zeros(()),
            lambda s, b: (s + b.sum(), {"loss": s}),
            ft.ArrayLoader(np.ones(4, np.float32), 2),
            epochs=epochs,
            checkpointer=ft.Checkpointer(tmp_path / "d" / "run"),
            hooks=[
                ft.hooks.CSVLogger(tmp_path / "d" / "log.csv"),
                ft.hooks.JSONLines(tmp_path / "d" / "log.jsonl", every=1),
            ],
            verbose=0,
        )

    place = tmp_path / "d"
    place.mkdir()
    mount(place, "size=8m")
    try:
        done = fit(2)
        subprocess.run(["mount", "-o", "remount,ro", place], check=True)
        again = fit(2)
        assert again.state == done.state
        assert again.history.steps["loss"].tolist() == done.history.steps["loss"].tolist()
        with pytest.raises(OSError, match="Read-only"):
            fit(3)  # this one would write
    finally:
        subprocess.run(["umount", "-l", place], check=True)
