"""Processes killed at random moments, twenty times: what comes out is what comes of none."""

import os
import pathlib
import random
import re
import signal
import threading
import time
from concurrent import futures

import pytest

from tests.distributed.test_launch import TRAINING, launched

TRAININGS, KILLS, EPOCHS = 4, 5, 60


def ends(printed: list[str]) -> list[str]:
    """Returns the digests at the end, wherever in a line: C++ libraries write between."""
    return re.findall(r"ends ([0-9a-f]{64})", "\n".join(printed))


class Watched:
    """A launched training, of which one process is killed now and then."""

    def __init__(self, folder: pathlib.Path) -> None:
        self._launcher = launched("--restarts", 99, TRAINING, folder, EPOCHS)
        self.lines: list[str] = []
        self._moved = threading.Event()
        self._readers = futures.ThreadPoolExecutor()
        self._out = self._readers.submit(self._read)
        self._err = self._readers.submit(self._launcher.stderr.read)

    def _read(self) -> None:
        for line in self._launcher.stdout:
            self.lines.append(line.rstrip())
            if "step " in line:
                self._moved.set()

    def kill_one(self, chance: random.Random) -> bool:
        """Kills one of the processes at some moment of a life; returns whether there was one."""
        time.sleep(2)  # steps of the life before are not those of this one
        self._moved.clear()
        trains = chance.random() < 0.7  # else it is killed while it begins
        while trains and not self._moved.wait(0.1):
            if self._launcher.poll() is not None:
                return False
        time.sleep(chance.uniform(0, 3))
        pid = self._launcher.pid
        children = pathlib.Path(f"/proc/{pid}/task/{pid}/children")
        if self._launcher.poll() is not None or not (found := children.read_text().split()):
            return False
        os.kill(int(chance.choice(found)), signal.SIGKILL)
        return True

    def ended(self) -> str:
        """Waits; returns what the launcher said."""
        self._out.result(timeout=600)
        err = self._err.result(timeout=600)
        with self._launcher:  # which closes what it was read from
            assert self._launcher.wait() == 0, err[-3000:]
        self._readers.shutdown()
        return err


@pytest.mark.long
def test_a_process_killed_at_twenty_random_moments_costs_no_bit(tmp_path: pathlib.Path) -> None:
    alone = Watched(tmp_path / "straight")
    alone.ended()
    straight = set(ends(alone.lines))
    assert len(straight) == 1, alone.lines[-20:]
    chance, kills, restarts, went_on = random.Random(0), 0, 0, 0
    for life in range(TRAININGS):
        training = Watched(tmp_path / str(life))
        kills += sum(training.kill_one(chance) for _ in range(KILLS))
        restarts += training.ended().count("restarting all processes")
        said = ends(training.lines)  # more than twice, where one was killed when all was over
        assert len(said) >= 2, training.lines[-20:]
        assert set(said) == straight
        went_on += any("begins " in line for line in training.lines)
    print(f"{kills} kills, {restarts} restarts, {went_on} trainings went on from a checkpoint")
    assert kills > TRAININGS
    assert went_on
