"""Resume ≡ straight: the whole state, the history and the files of logs, to the bit."""

import pathlib
import signal
import subprocess
import sys
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

import functrain as ft

from ..conftest import digest
from .trainings import PER_EPOCH, TRAININGS, TwoStepsAndEpochs, bits, train

ROOT = pathlib.Path(__file__).parents[2]


class InterruptedError(Exception):
    """What ends a life."""


def ends_at(step: int | None = None, epoch: int | None = None) -> Any:
    def end(event: Any) -> None:
        is_end = isinstance(event, ft.events.EpochEnd)
        if (event.step == step and not is_end) or (is_end and event.epoch == epoch):
            raise InterruptedError

    if step is not None:
        end.every = ft.at(step)  # type: ignore[attr-defined]
    return end


# Steps per program, and what ends the life: after it comes the one that goes on.
LIVES = [
    (4, {"step": 1}),  # before anything was saved
    (4, {"step": 4}),  # in the first epoch; step 2 is there
    (1, {"epoch": 1}),  # the last chunk of an epoch is there, its end is not
    (4, {"step": 2 * PER_EPOCH + 1}),  # the end of an epoch is there
    (1, {"step": 3 * PER_EPOCH}),  # in the last epoch
    (4, {"epoch": 2}),  # at the very end
]


QUICK = ("convnet_with_batch_norm",)


@pytest.mark.parametrize(
    "name", [n if n in QUICK else pytest.param(n, marks=pytest.mark.long) for n in TRAININGS]
)
def test_a_training_that_ended_again_and_again_is_the_one_that_never_did(
    name: str, tmp_path: pathlib.Path
) -> None:
    straight, broken = tmp_path / "straight", tmp_path / "broken"
    expected = bits(train(name, straight, 4), straight)
    begun = []
    for fuse, end in LIVES:
        checkpointer = ft.Checkpointer(broken / "checkpoints", every=TwoStepsAndEpochs())
        begun.append(checkpointer.latest())
        with pytest.raises(InterruptedError):
            train(name, broken, fuse, checkpointer, ends_at(**end))
    checkpointer = ft.Checkpointer(broken / "checkpoints")
    begun.append(checkpointer.latest())
    assert begun == [None, None, 2, 10, 10, 14, 14]
    assert bits(train(name, broken, 1, checkpointer), broken) == expected


def lives_that_are_killed(name: str, folder: pathlib.Path, killed_at: list[int]) -> str:
    """Runs a training in processes of its own, each of which is killed but the last."""
    for fuse, step in zip((4, 1, 3, 2), [*killed_at, 0], strict=False):
        arguments = [name, str(folder), str(fuse), str(step)]
        done = subprocess.run(
            [sys.executable, "-m", "tests.identities.trainings", *arguments],
            capture_output=True,
            text=True,
            cwd=ROOT,
            check=False,
        )
        assert done.returncode == (-signal.SIGKILL if step else 0), done.stderr[-3000:]
    return done.stdout.strip()


@pytest.mark.long
@pytest.mark.parametrize("name", TRAININGS)
def test_processes_that_are_killed_end_with_the_same_bits(
    name: str, tmp_path: pathlib.Path
) -> None:
    expected = bits(train(name, tmp_path / "a", 4), tmp_path / "a")
    assert lives_that_are_killed(name, tmp_path / "b", [4, 11, 14]) == expected


# A score that is best after 8 steps: what EarlyStopping makes of it does not hang on a model.
DATA = ft.ArrayLoader(np.ones(12, np.float32), 4, shuffle=True)  # three steps an epoch


def count(state: Any, batch: Any) -> Any:
    return {"n": state["n"] + jnp.sum(batch) / 4, "far": state["far"] * 1.01}, {}


def score(event: Any) -> None:
    event.values["val_loss"] = abs(float(event.state["n"]) - 8.0)


score.every = ft.every(steps=2)  # type: ignore[attr-defined]


def stopped_early(folder: Any, last: Any = None, epochs: int = 9, **how: Any) -> Any:
    early = ft.hooks.EarlyStopping("val_loss", **how)
    hooks = [score, early, *([] if last is None else [last])]
    checkpointer = None if folder is None else ft.Checkpointer(folder, every=ft.every(steps=1))
    start = {"n": jnp.zeros(()), "far": jnp.ones(3)}
    state, history = ft.fit(
        start, count, DATA, epochs=epochs, hooks=hooks, checkpointer=checkpointer, verbose=0
    )
    return digest((state, history.within_epochs)), float(state["n"]), early


@pytest.mark.parametrize("restore_best", [True, False])
@pytest.mark.parametrize("ends", [[5, 10], [8, 9], [13]], ids=str)
def test_early_stopping_goes_on_in_the_middle(
    ends: list[int], restore_best: bool, tmp_path: pathlib.Path
) -> None:
    how = {"restore_best": restore_best, "patience": 3}
    expected, n, _ = stopped_early(None, **how)
    assert n == (8 if restore_best else 14)
    for end in ends:
        with pytest.raises(InterruptedError):
            stopped_early(tmp_path, ends_at(step=end), **how)
    found, _, early = stopped_early(tmp_path, **how)
    assert found == expected
    assert (early.best, early.best_step) == (0.0, 8)


def test_more_epochs_go_on_from_the_last_state_and_not_from_the_best(
    tmp_path: pathlib.Path,
) -> None:
    how = {"patience": 99, "restore_best": True}
    _, n, _ = stopped_early(tmp_path, epochs=4, **how)
    assert n == 8
    expected, *_ = stopped_early(None, epochs=6, **how)
    for _ in range(2):  # the second is over already, and returns the best state
        assert stopped_early(tmp_path, epochs=6, **how)[0] == expected
