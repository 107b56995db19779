"""One writer to a directory; what others put there is neither overwritten nor followed."""

import errno
import gc
import os
import stat
import subprocess
import sys
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

import functrain as ft
from tests import fork_server

LIKE = {"x": np.zeros(3)}


def fill(directory: Any, *steps: int) -> None:
    with ft.Checkpointer(directory, keep=None) as checkpoints:
        for step in steps:
            checkpoints.save({"x": np.full(3, float(step))}, step)


WRITER = """
import sys, numpy as np, functrain as ft
checkpoints = ft.Checkpointer(sys.argv[1])
checkpoints.save({"x": np.ones(3)}, 1)
print("writes", flush=True)
sys.stdin.readline()
"""


@pytest.mark.parametrize(("count", "is_told"), [("1", False), ("2", True)])
def test_one_of_several_processes_that_are_not_connected_is_told_how_to_connect(
    place, monkeypatch, count, is_told
) -> None:
    monkeypatch.setenv("JAX_NUM_PROCESSES", count)
    first, second = ft.Checkpointer(place), ft.Checkpointer(place)

    def save_in_turns() -> None:
        for step, checkpoints in enumerate((first, second, first)):  # a store refuses the older one
            checkpoints.save(LIKE, step)

    with pytest.raises(RuntimeError, match="expected to be the only writer") as error:
        save_in_turns()
    advice = "started as one of 2, but runs alone: call functrain.distributed.initialize()"
    assert (advice in str(error.value)) == is_told
    first.close()
    second.close()


def test_a_second_process_that_writes_is_refused_and_one_that_reads_is_not(tmp_path) -> None:
    with fork_server.Popen(
        [sys.executable, "-c", WRITER, tmp_path],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as other:
        assert other.stdout is not None
        assert other.stdout.readline() == "writes\n"
        mine = ft.Checkpointer(tmp_path)
        assert mine.restore(LIKE).position.step == 1
        assert mine.verify() == {}
        refused = rf"only writer of this directory, but process {other.pid} is"
        with pytest.raises(RuntimeError, match=refused):
            mine.save(LIKE, 2)
        with pytest.raises(RuntimeError, match=refused):
            mine.rollback(1)
        with pytest.raises(RuntimeError, match=refused):
            ft.fit(jnp.zeros(()), lambda s, b: (s, {}), [np.ones(2)], checkpointer=mine, verbose=0)
        other.kill()
    mine.save(LIKE, 2)
    assert mine.steps() == [1, 2]
    mine.close()


def test_a_second_one_in_the_same_process_is_refused_until_the_first_is_closed_or_gone(
    tmp_path,
) -> None:
    first, second = ft.Checkpointer(tmp_path), ft.Checkpointer(tmp_path)
    first.save(LIKE, 1)
    with pytest.raises(RuntimeError, match=r"another writer in this process.*close\(\)"):
        second.save(LIKE, 2)
    first.close()
    second.save(LIKE, 2)
    with pytest.raises(RuntimeError, match="only writer of this directory"):
        first.save(LIKE, 3)
    del second
    gc.collect()
    first.save(LIKE, 3)
    assert first.steps() == [1, 2, 3]
    first.close()


def test_a_forked_child_does_not_hold_the_lock_of_its_parent(tmp_path) -> None:
    program = f"""
import os, signal, sys, time, warnings, numpy as np
warnings.simplefilter("ignore")
import functrain as ft
checkpoints = ft.Checkpointer({str(tmp_path)!r})
checkpoints.save({{"x": np.zeros(3)}}, 1)
if (child := os.fork()) == 0:
    os.close(1)
    time.sleep(100)
print(child, flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""
    done = fork_server.run([sys.executable, "-c", program], stdout=subprocess.PIPE, check=False)
    child = int(done.stdout)
    try:
        fill(tmp_path, 2)
        assert ft.Checkpointer(tmp_path).steps() == [1, 2]
    finally:
        os.kill(child, 9)


def test_a_child_forked_during_a_save_holds_no_lock_and_waits_for_nothing(tmp_path) -> None:
    program = f"""
import fcntl, os, sys, warnings
warnings.simplefilter("ignore")
from functrain.checkpoint._writer import Writer
from functrain.common import _locks
read, write = os.pipe()
writer = Writer()
writer.start(lambda: os.read(read, 1))
if (child := os.fork()) == 0:
    os.write(write, b" ")  # for the parent
    sys.exit()
os.waitpid(child, 0)
with _locks.exclusive_access({str(tmp_path)!r}):
    if os.fork() == 0:
        os.read(read, 1)
fcntl.flock(os.open({str(tmp_path)!r}, os.O_RDONLY), fcntl.LOCK_EX | fcntl.LOCK_NB)
os.write(write, b"  ")
"""
    fork_server.run([sys.executable, "-c", program], check=True, timeout=60)


def test_a_file_system_without_locks_and_flushes_of_directories_is_written_to(
    tmp_path, monkeypatch
) -> None:
    def no_lock(*arguments: Any) -> None:
        raise OSError(errno.ENOSYS, "Function not implemented")

    def files_only(handle: int, sync: Any = os.fsync) -> None:
        if stat.S_ISDIR(os.fstat(handle).st_mode):
            raise OSError(errno.EINVAL, "Invalid argument")
        sync(handle)

    monkeypatch.setattr("fcntl.flock", no_lock)
    monkeypatch.setattr("os.fsync", files_only)
    fill(tmp_path / "run", 1, 2)
    ft.save(tmp_path / "state", LIKE)
    assert ft.Checkpointer(tmp_path / "run").steps() == [1, 2]


@pytest.mark.parametrize("kind", ["link", "dangling", "file"])
def test_what_stands_under_the_name_of_a_step_is_neither_followed_nor_overwritten(
    tmp_path, kind
) -> None:
    fill(tmp_path / "elsewhere", 7)
    fill(tmp_path / "here", 1)
    target, place = tmp_path / "elsewhere" / f"{7:012d}", tmp_path / "here" / f"{2:012d}"
    if kind in ("link", "dangling"):
        place.symlink_to(target if kind == "link" else tmp_path / "nowhere")
    else:
        place.write_text("mine")
    before = sorted(map(str, tmp_path.rglob("*")))
    checkpoints = ft.Checkpointer(tmp_path / "here", keep=1)
    assert checkpoints.steps() == [1]
    assert checkpoints.restore(LIKE).position.step == 1
    with pytest.raises(FileExistsError, match=place.name):
        checkpoints.save(LIKE, 2)
    after = sorted(str(path) for path in tmp_path.rglob("*"))
    assert after == before
    os.rename(place, tmp_path / "away")
    checkpoints.save(LIKE, 2)
    assert checkpoints.steps() == [2]
    checkpoints.close()


def test_a_directory_that_others_use_too_keeps_what_is_theirs(tmp_path) -> None:
    names = ["data.csv", "12", "0000000001", f"{2:012d}", f"{4:012d}", ".lock"]
    for name in names:
        (tmp_path / name).mkdir()
        (tmp_path / name / "theirs").write_text(name)
    with ft.Checkpointer(tmp_path, keep=1) as checkpoints:
        for step in (1, 2, 3):
            checkpoints.save(LIKE, step)
    for name in names:
        assert (tmp_path / name / "theirs").read_text() == name
    assert ft.Checkpointer(tmp_path).steps() == [3]


def test_a_link_in_place_of_the_lock_is_not_written_through(tmp_path) -> None:
    (tmp_path / "precious").write_text("mine")
    (tmp_path / "d").mkdir()
    (tmp_path / "d" / ".functrain-lock").symlink_to(tmp_path / "precious")
    with pytest.raises(OSError, match="functrain-lock"):
        ft.Checkpointer(tmp_path / "d").save(LIKE, 1)
    assert (tmp_path / "precious").read_text() == "mine"


def test_overwriting_through_a_link_replaces_what_it_points_to(tmp_path) -> None:
    ft.save(tmp_path / "run7", LIKE)
    os.symlink("run7", tmp_path / "latest")
    ft.save(tmp_path / "latest", {"x": np.ones(3)}, overwrite=True)
    assert os.readlink(tmp_path / "latest") == "run7"
    assert ft.load(tmp_path / "run7", LIKE)["x"].all()
    assert sorted(os.listdir(tmp_path)) == ["latest", "run7"]


SAVER = """
import sys, numpy as np, functrain as ft
path, number = sys.argv[1], int(sys.argv[2])
print("ready", flush=True)
sys.stdin.readline()
for _ in range(25):
    ft.save(path, {"x": np.full(20_000, number), "y": np.full(3, number)}, overwrite=True)
"""


def test_two_processes_that_save_to_one_path_leave_a_whole_one_and_readers_never_fail(
    tmp_path,
) -> None:
    like = {"x": np.zeros(20_000, int), "y": np.zeros(3, int)}
    path = tmp_path / "c"
    ft.save(path, like)
    savers = [
        fork_server.Popen(
            [sys.executable, "-c", SAVER, path, str(number)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for number in (1, 2)
    ]
    for saver in savers:
        assert saver.stdout is not None
        assert saver.stdout.readline() == "ready\n"
    for saver in savers:
        assert saver.stdin is not None
        print(file=saver.stdin, flush=True)
    reads = 0
    while any(saver.poll() is None for saver in savers):
        found = ft.load(path, like)
        assert {*np.unique(found["x"]), *np.unique(found["y"])} in ({0}, {1}, {2})
        reads += 1
    for saver in savers:
        assert saver.communicate()[1] == ""
        assert saver.returncode == 0
    assert reads > 5
    assert ft.load(path, like)["y"][0] in (1, 2)
    assert os.listdir(tmp_path) == ["c"]


@pytest.mark.slow
def test_a_process_that_reads_is_not_disturbed_by_retention(tmp_path) -> None:
    program = f"""
import sys, numpy as np, functrain as ft
checkpoints = ft.Checkpointer({str(tmp_path)!r}, keep=1)
for step in range(1, 60):
    checkpoints.save({{"x": np.full(20_000, step)}}, step)
"""
    like = {"x": np.zeros(20_000, int)}
    with fork_server.Popen([sys.executable, "-c", program], stderr=subprocess.PIPE) as writer:
        checkpoints, seen = ft.Checkpointer(tmp_path), []
        while writer.poll() is None:
            if checkpoints.steps():
                state, position, *_ = checkpoints.restore(like)
                assert np.all(state["x"] == position.step)
                seen.append(position.step)
        assert writer.communicate()[1] == b""
    assert seen == sorted(seen)
    assert len(set(seen)) > 5


@pytest.mark.parametrize("below", ["", "run"])
def test_a_file_in_place_of_the_directory_is_told(tmp_path, below):
    (tmp_path / "file").write_text("mine")
    with pytest.raises(FileExistsError, match=r"file.*: expected a directory, got .* another path"):
        ft.Checkpointer(tmp_path / "file" / below).save(LIKE, 1)
    assert (tmp_path / "file").read_text() == "mine"
