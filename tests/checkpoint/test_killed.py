"""Killed at any moment: every checkpoint that is listed is whole, and what was saved is there."""

import functools
import math
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable

import jax
import numpy as np
import pytest

import functrain as ft
from tests.checkpoint import lives


class Lives:
    """A process that begins lives, one after the other."""

    def __init__(self) -> None:
        self._parent = subprocess.Popen(
            [sys.executable, lives.__file__],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def kill_one(self, directory: str, aim: Callable[[str], None]) -> int:
        """Begins one, kills it some time after its first save; returns the last it told of."""
        parent = self._parent
        assert parent.stdin is not None
        assert parent.stdout is not None
        print(directory, file=parent.stdin, flush=True)
        life = int(parent.stdout.readline().removeprefix("life "))
        saved = int(parent.stdout.readline().removeprefix("saved "))
        aim(directory)
        os.kill(life, signal.SIGKILL)
        while (line := parent.stdout.readline()) != "killed\n":
            saved = int(line.removeprefix("saved "))
        return saved

    def close(self) -> None:
        self._parent.communicate(timeout=60)


def any_time(chance: random.Random, directory: str) -> None:
    time.sleep(chance.uniform(0, 0.4))


def when_one_is_removed(chance: random.Random, directory: str) -> None:
    """There is a new one: the next thing that happens is that an old one goes."""
    before = len(os.listdir(directory))
    until = time.monotonic() + 2
    while time.monotonic() < until and (now := len(os.listdir(directory))) <= before:
        before = now
    time.sleep(chance.uniform(0, 0.002))


AIMS = (any_time, when_one_is_removed)


@pytest.fixture
def some_lives():
    found = Lives()
    yield found
    found.close()


def best_loss(steps: Iterable[int]) -> float:
    return min(x for x in map(lives.loss_of, steps) if not math.isnan(x))


def require_whole(directory: str, saved: int) -> None:
    checkpoints = ft.Checkpointer(directory, monitor="loss")
    assert checkpoints.verify() == {}
    latest = checkpoints.latest()
    assert latest is not None
    assert latest >= saved
    assert len(checkpoints.steps()) >= lives.KEEP
    assert best_loss(checkpoints.steps()) <= best_loss(range(1, saved + 1))
    for step in checkpoints.steps():
        state, position, values, documents = checkpoints.restore(lives.state_of(0, 0), step)
        number = documents["here"]["number"]
        assert number // 10 == step == position.step
        assert all(np.all(leaf == number) for leaf in jax.tree.leaves(state))
        assert np.all(documents["here"]["x"] == step)
        assert np.array_equal(values["loss"], lives.loss_of(step), equal_nan=True)


@pytest.mark.parametrize(
    ("seed", "kills"),
    [(0, 8), pytest.param(2, 300, marks=pytest.mark.long)],
)
def test_every_checkpoint_is_whole_whenever_its_process_is_killed(
    tmp_path, some_lives, seed, kills
) -> None:
    chance = random.Random(seed)
    for i in range(kills):
        aim = functools.partial(AIMS[i % len(AIMS)], chance)
        saved = some_lives.kill_one(str(tmp_path), aim)
        require_whole(str(tmp_path), saved)
