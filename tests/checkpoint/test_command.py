"""`python -m functrain.checkpoint`: what it shows, and what it ends with."""

import os
import pathlib
import subprocess
import sys

import numpy as np
import pytest

import functrain as ft
from functrain.checkpoint.__main__ import main

STATE = {"w": np.ones(3)}


@pytest.fixture
def run(tmp_path):
    with ft.Checkpointer(tmp_path / "run") as checkpoints:
        for step, loss in ((10, 0.5), (20, 0.25), (1200, float("nan"))):
            at = ft.Position(step, step // 10, batch=7 * (step == 1200))
            values = {"val_loss": loss, "val_accuracy": 1 - loss, "score": 3.0}
            checkpoints.save(STATE, at, values=values)
    return tmp_path / "run"


def shown(capsys, *arguments):
    """The status, and what is printed: the lines that are not empty."""
    status = main([*map(str, arguments)])
    return status, [line for line in capsys.readouterr().out.splitlines() if line.strip()]


def test_a_directory_is_listed(run, capsys) -> None:
    status, (head, *rows) = shown(capsys, run)
    assert (status, head) == (0, f"{run}: 3 not verified, 0 damaged")
    assert [int(row.split()[0]) for row in rows] == [10, 20, 1200]
    assert "'epoch': 120, 'batch': 7" in rows[2]
    assert rows[1].endswith("{'val_loss': 0.25, 'val_accuracy': 0.75, 'score': 3.0}")


def test_one_checkpoint_is_listed_as_well(run, tmp_path, capsys) -> None:
    status, lines = shown(capsys, run / f"{20:012d}")
    assert status == 0
    assert lines[-1].split()[0] == f"{20:012d}"
    ft.save(tmp_path / "single", STATE)
    assert shown(capsys, tmp_path / "single", "--verify")[0] == 0


def flip(directory):
    """Flips bits of the last leaf."""
    (path,) = pathlib.Path(directory).glob("arrays-0-*")
    data = bytearray(path.read_bytes())
    data[-5:] = (byte ^ 1 for byte in data[-5:])
    path.write_bytes(data)


def test_verify_reads_every_byte(run, capsys) -> None:
    assert shown(capsys, run, "--verify")[0] == 0
    flip(run / f"{20:012d}")
    assert shown(capsys, run)[0] == 0
    status, lines = shown(capsys, run, "--verify")
    assert (status, lines[0]) == (1, f"{run}: 2 intact, 1 damaged")
    assert lines[-1].startswith(f"damaged: {run}/{20:012d}: expected the bytes of")


@pytest.mark.parametrize(
    ("harm", "got"),
    [
        (pathlib.Path.unlink, "its file is missing"),
        (lambda path: os.truncate(path, 100), "100 bytes instead of"),
    ],
)
def test_a_missing_or_short_file_is_found_without_reading_it(run, capsys, harm, got) -> None:
    (path,) = (run / f"{1200:012d}").glob("arrays-0-*")
    harm(path)
    status, lines = shown(capsys, run)
    assert (status, lines[0]) == (1, f"{run}: 2 not verified, 1 damaged")
    assert lines[-1].startswith(f"damaged: {run}/{1200:012d}: expected the files of its arrays")
    assert got in lines[-1]


def test_a_checkpoint_that_says_nothing_of_itself_is_damaged(run, capsys) -> None:
    (run / f"{20:012d}" / "checkpoint.json").write_text("{}")
    for path in (run, run / f"{20:012d}"):
        status, lines = shown(capsys, path)
        assert status == 1
        assert "expected the manifest of a checkpoint" in lines[-1]


@pytest.mark.parametrize("arguments", [["nothing"], ["file"], ["folder"], ["nothing", "--verify"]])
def test_what_is_no_checkpoint_is_said_in_a_line(tmp_path, monkeypatch, capsys, arguments) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").write_text("text")
    (tmp_path / "folder").mkdir()
    assert main(arguments) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err.count("\n") == 1
    assert "expected a" in printed.err


def test_the_command_runs_in_a_process_of_its_own_and_ends_with_its_status(run) -> None:
    def status(*arguments):
        command = [sys.executable, "-W", "error", "-m", "functrain.checkpoint", *arguments]
        env = {**os.environ, "JAX_PLATFORMS": "cuda"}  # not asked for: nothing runs on a device
        done = subprocess.run(command, cwd=run.parent, env=env, capture_output=True, text=True)
        return done.returncode, done.stdout, done.stderr

    code, out, err = status("run", "--verify")
    assert (code, err) == (0, "")
    assert "3 intact, 0 damaged" in out
    refused = "nothing: expected a checkpoint, got nothing. Check the path."
    code, out, err = status("nothing")
    assert (code, out) == (2, "")
    assert err.startswith(f"{run.parent}/{refused}")
