"""Processes killed at random moments, twenty times: what comes out is what comes of none."""

import os
import pathlib
import random
import signal
import subprocess
import time
from concurrent import futures

import pytest

from tests.distributed.test_launch import TRAINING, launched

TRAININGS, KILLS, EPOCHS = 4, 5, 30


def ends(printed: str) -> list[str]:
    lines = [line.removeprefix("[1] ") for line in printed.splitlines()]
    return [line for line in lines if line.startswith("ends ")]


def kill_one_after(seconds: float, launcher: subprocess.Popen[str], chance: random.Random) -> bool:
    """Kills one of the processes; returns whether there was one."""
    time.sleep(seconds)
    children = pathlib.Path(f"/proc/{launcher.pid}/task/{launcher.pid}/children")
    if launcher.poll() is not None or not (found := children.read_text().split()):
        return False
    os.kill(int(chance.choice(found)), signal.SIGKILL)
    return True


@pytest.mark.long
def test_a_process_killed_at_twenty_random_moments_costs_no_bit(tmp_path: pathlib.Path) -> None:
    began = time.monotonic()
    out, err = launched(TRAINING, tmp_path / "straight", EPOCHS).communicate(timeout=600)
    takes, straight = time.monotonic() - began, set(ends(out))
    assert len(straight) == 1, err[-3000:]
    chance, kills, restarts, went_on = random.Random(0), 0, 0, 0
    for life in range(TRAININGS):
        launcher = launched("--restarts", 99, TRAINING, tmp_path / str(life), EPOCHS)
        with futures.ThreadPoolExecutor() as readers:  # or a full pipe would hold it up
            printed = readers.submit(launcher.communicate, timeout=1_200)
            for _ in range(KILLS):
                kills += kill_one_after(chance.uniform(0, takes), launcher, chance)
            out, err = printed.result()
        assert launcher.returncode == 0, err[-3000:]
        said = ends(out)  # more than twice, where one was killed when all was over
        assert len(said) >= 2, (out[-3000:], err[-3000:])
        assert set(said) == straight
        restarts += err.count("starting all of them again")
        went_on += sum(line.startswith("begins ") for line in out.splitlines())
    print(f"{kills} kills, {restarts} restarts, {went_on} of them from a checkpoint")
    assert kills >= TRAININGS
    assert went_on
