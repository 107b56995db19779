"""Steps count from the beginning of training, and a run begins at any position."""

import copy
import pickle
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

import functrain as ft
from tests.conftest import digest

X = np.random.default_rng(0).normal(size=(35, 3)).astype(np.float32)


def step(state: Any, batch: Any) -> Any:
    return {"w": state["w"] * 0.9 + batch.mean(0)}, {"norm": jnp.sum(state["w"] ** 2)}


START = {"w": np.ones(3, np.float32)}
LOADER = ft.ArrayLoader(X, 5, shuffle=True, seed=3)  # seven batches an epoch


def states(**how: Any) -> dict[int, str]:
    """A hash of the state after every step."""
    events = ft.run(how.pop("state", START), step, how.pop("data", LOADER), fuse=1, **how)
    return {e.step: digest(e.state) for e in events if isinstance(e, ft.events.ChunkEnd)}


@pytest.mark.parametrize("at", [0, 1, 6, 7, 8, 16])
@pytest.mark.parametrize("fuse", [1, 4])
def test_the_rest_of_a_run_is_the_runs_rest(at, fuse) -> None:
    whole = states(epochs=3)
    middle = START if at == 0 else None
    for event in ft.run(START, step, LOADER, epochs=3, fuse=1):
        if isinstance(event, ft.events.ChunkEnd) and event.step == at:
            middle = {"w": np.array(event.state["w"])}
            break
    start = ft.Position.from_step(step=at, steps_per_epoch=len(LOADER))
    for event in ft.run(middle, step, LOADER, epochs=3, start=start, fuse=fuse):
        assert digest(event.state) == whole[event.step]
    assert event.position == (21, 2, 7)


def test_an_epoch_that_was_over_already_does_not_end_again() -> None:
    def batches() -> Any:
        yield from [np.full((2, 3), i, np.float32) for i in range(4)]

    class Endless:
        """An iterable without a length."""

        def __iter__(self) -> Any:
            return batches()

    events = ft.run(START, step, Endless(), epochs=3, start=ft.Position(8, 1, 4))
    ended = [event.epoch for event in events if isinstance(event, ft.events.EpochEnd)]
    assert ended == [2]


def test_hooks_go_on_counting_where_the_training_is() -> None:
    seen: list[int] = []
    hook = ft.every(steps=4)(lambda event: seen.append(event.step))
    first = ft.fit(START, step, LOADER, hooks=[hook], verbose=0).state
    start = ft.Position(step=7, epoch=1)
    ft.fit(first, step, LOADER, epochs=2, start=start, hooks=[hook], verbose=0)
    assert seen == [4, 8, 12]


@pytest.mark.parametrize(
    ("start", "error", "message"),
    [
        (3, TypeError, r"expected a functrain\.Position\(step, epoch, batch\), got 3"),
        (ft.Position(2, 0, 3), ValueError, "no more batches in the epoch than steps"),
        (ft.Position(-1), ValueError, "start: expected whole numbers"),
        (ft.Position(2, 1.5), ValueError, "start: expected whole numbers"),  # type: ignore[arg-type]
        (ft.Position(14, 0, 8), ValueError, "start: expected at most 7 batches in an epoch"),
        (ft.Position(14, 2), ValueError, "epochs: expected more than the 2 that are over"),
        (ft.Position(14, 1, 7), ValueError, "epochs: expected more than the 2 that are over"),
    ],
)
def test_a_start_that_makes_no_sense_is_refused(start, error, message) -> None:
    with pytest.raises(error, match=message):
        ft.run(START, step, LOADER, epochs=2, start=start)


def test_a_position_survives_pickling_and_copying() -> None:
    position = ft.Position(25, 2, 5)
    assert pickle.loads(pickle.dumps(position)) == copy.deepcopy(position) == (25, 2, 5)
    assert position._replace(batch=6) == ft.Position(25, 2, 6)
