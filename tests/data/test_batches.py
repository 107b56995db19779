"""The protocol between data and the engine, held by every adapter."""

from typing import Any

import jax
import numpy as np
import pytest

import functrain as ft
from functrain.common._tree import signature
from functrain.data._adapt import as_batches
from functrain.data._batches import Batches, NoData
from functrain.data._epochs_of_steps import EpochsOfSteps

X = np.arange(23, dtype=np.float32)


class Reiterable:
    """Batches of a generator that can be begun again."""

    def __iter__(self) -> Any:
        for start in range(0, len(X), 4):
            yield X[start : start + 4]


ADAPTERS = {
    "loader": lambda: as_batches(ft.ArrayLoader(X, 4)),
    "loader that shuffles": lambda: as_batches(ft.ArrayLoader(X, 4, shuffle=True)),
    "list": lambda: as_batches(list(Reiterable())),
    "iterable": lambda: as_batches(Reiterable()),
    "epochs of steps": lambda: EpochsOfSteps(as_batches(ft.ArrayLoader(X, 4)), 4),
    "epochs of steps of an iterable": lambda: EpochsOfSteps(as_batches(Reiterable()), 4),
    "no data": lambda: as_batches(NoData(6)),
}


def taken(batches: Batches, k: int) -> list[Any]:
    """The batches of the rest of an epoch, one by one, taken in chunks of up to k."""
    rest: list[Any] = []
    while batches.peek() is not None:
        chunk = batches.take(k, k)
        rest += [jax.tree.map(lambda x, i=i: x[i], chunk.batches) for i in range(chunk.steps)]
    return rest


def same(a: Any, b: Any) -> bool:
    return len(a) == len(b) and all(jax.tree.leaves(jax.tree.map(np.array_equal, a, b)))


@pytest.mark.parametrize("name", ADAPTERS)
@pytest.mark.parametrize("k", [2, 5])
def test_batches_do_not_depend_on_how_many_are_taken_at_a_time(name: str, k: int) -> None:
    batches, others = ADAPTERS[name](), ADAPTERS[name]()
    for epoch in range(3):
        batches.begin(epoch)
        others.begin(epoch)
        assert same(taken(batches, 1), taken(others, k))


@pytest.mark.parametrize("name", ADAPTERS)
def test_a_look_at_the_next_batch_takes_none(name: str) -> None:
    batches, others = ADAPTERS[name](), ADAPTERS[name]()
    assert signature(batches.first()) == signature(batches.first())
    batches.begin(0)
    others.begin(0)
    for _ in range(3):
        assert signature(batches.peek()) == signature(others.peek())
    assert same(taken(batches, 3), taken(others, 3))


@pytest.mark.filterwarnings("ignore:data. Reiterable does not report its position")
@pytest.mark.parametrize("name", ADAPTERS)
def test_others_go_on_from_the_position_after_every_batch(name: str) -> None:
    whole = ADAPTERS[name]()
    whole.begin(0)
    expected = [taken(whole, 2)]
    whole.begin(1)
    expected.append(taken(whole, 2))
    for at in range(len(expected[0]) + 1):
        first, second = ADAPTERS[name](), ADAPTERS[name]()
        first.track()
        second.track()
        first.begin(0)
        for _ in range(at):
            assert first.peek() is not None
            first.take(1, 1)
        changed = second.restore(first.state(epoch_is_over=False), 0, at)
        assert changed == []
        second.begin(0, at)
        assert same(taken(second, 2), expected[0][at:])
        second.begin(1)
        assert same(taken(second, 2), expected[1])


@pytest.mark.parametrize("steps", [0, 2.0, None])
def test_a_number_of_steps_below_one_is_refused(steps: Any) -> None:
    with pytest.raises(ValueError, match="steps: expected an integer of at least 1"):
        NoData(steps)


def test_none_as_a_batch_is_refused_with_what_stands_for_no_arrays() -> None:
    with pytest.raises(TypeError, match=r"batch 0 .*: expected a batch, got None.*empty tuple"):
        ft.fit(0, lambda state, batch: (state, {}), [None], verbose=0)
    state, _ = ft.fit(0, lambda state, batch: (state + 1, {}), [()] * 3, verbose=0)
    assert int(state) == 3


class Tensor:
    """An array of another library, whose dtype is none of NumPy's."""

    dtype = "float32 of another library"

    def __init__(self, x: np.ndarray) -> None:
        self.x, self.shape = x, x.shape

    def numpy(self) -> np.ndarray:
        return self.x


def test_a_list_of_tensors_is_looked_at_before_the_first_step() -> None:
    def step(state: Any, batch: Any) -> Any:
        return state, {"error": batch.mean()}

    stopping = ft.hooks.EarlyStopping("error")
    batches = [Tensor(X[:4]), Tensor(X[4:6])]
    _, history = ft.fit(0, step, batches, hooks=[stopping], verbose=0)
    assert history.steps["error"].tolist() == [1.5, 4.5]
