from typing import Any

import numpy as np
import pytest

import functrain as ft
from functrain.data._adapt import as_batches
from functrain.data._batches import example_count
from functrain.data._epochs_of_steps import EpochsOfSteps
from functrain.engine._plan import (
    CHUNK_PART,
    MAX_STEPS,
    MIN_STEPS,
    PROGRAM_SECONDS,
    Plan,
    auto_steps,
    chunks,
)
from functrain.targets import Chip
from functrain.targets._chips import machine_memory

ACCELERATOR = Chip("made up", 16 * 2**30, 1e12, 1e14, 1e9, "")


class Feed:
    """Epochs of data in chunks, with one plan for all of them."""

    def __init__(
        self,
        data: Any,
        fuse: Any,
        boundaries: Any = (),
        state_bytes: int = 0,
        chip: Chip | None = None,
    ) -> None:
        self.batches, self.boundaries = as_batches(data), boundaries
        self.plan = Plan(
            fuse,
            intervals=lambda: [self.batches.full_steps],
            state_bytes=state_bytes,
            chip=chip,
        )

    def epoch(self, epoch: int = 0, step: int = 0, start: int = 0) -> Any:
        position = ft.Position(step + start, epoch, start)
        return chunks(self.batches, self.plan, self.boundaries, position)


def sizes(feed: Feed, *at: int) -> list[tuple[int, int]]:
    return [(chunk.steps, example_count(chunk.batches, 1)) for chunk in feed.epoch(*at)]


def batches(*lengths: int) -> list[np.ndarray]:
    starts = np.cumsum((0, *lengths))
    return [np.arange(a, a + n, dtype=np.float32) for a, n in zip(starts, lengths, strict=False)]


def test_many_shapes_are_warned_of_once() -> None:
    with pytest.warns(UserWarning, match="data: expected batches of at most 16 shapes") as warnings:
        sizes(Feed(batches(*range(1, 30)), 2))
    assert len(warnings) == 1
    # Warnings are errors in tests.
    sizes(Feed(batches(*range(1, 17)), 2))


@pytest.mark.parametrize("as_loader", [True, False])
def test_k_steps_at_a_time_then_what_is_left_then_the_smaller_batch(as_loader) -> None:
    data = ft.ArrayLoader(np.arange(23), 3) if as_loader else batches(3, 3, 3, 3, 3, 3, 3, 2)
    assert sizes(Feed(data, 3)) == [(3, 3), (3, 3), (1, 3), (1, 2)]


@pytest.mark.parametrize("start", [0, 1, 5, 7])
def test_loader_and_iterable_feed_the_same_chunks_from_any_batch_on(start) -> None:
    loader = ft.ArrayLoader((np.arange(23), np.ones((23, 2))), 3, shuffle=True, seed=5)
    ours = Feed(loader, 4).epoch(2, start=start)
    theirs = Feed(list(loader.epoch(2)), 4).epoch(2, start=start)
    for a, b in zip(ours, theirs, strict=True):
        assert a.steps == b.steps
        for x, y in zip(a.batches, b.batches, strict=True):
            np.testing.assert_array_equal(x, y)


def test_a_start_behind_the_last_batch_is_refused() -> None:
    with pytest.raises(ValueError, match="expected more than 4 batches in epoch 0 of data, got 3"):
        sizes(Feed(batches(2, 2, 2), 2), 0, 0, 4)


def test_auto_takes_fewer_steps_for_short_epochs_and_large_batches() -> None:
    assert sizes(Feed(ft.ArrayLoader(np.arange(10_000), 10), "auto"))[0] == (128, 10)
    assert sizes(Feed(ft.ArrayLoader(np.arange(50), 10), "auto")) == [(5, 10)]
    large = [np.zeros((4, 2**21), np.float32)] * 5  # 32 MiB each: two make a chunk
    assert sizes(Feed(large, "auto")) == [(2, 4), (2, 4), (1, 4)]


# --- on accelerators, whose programs have loops of a known length --------------------------------


def rows(feed: Feed, *at: int) -> list[tuple[int, int]]:
    """Returns the steps and the rows of each chunk."""
    return [(chunk.steps, len(chunk.batches)) for chunk in feed.epoch(*at)]


@pytest.mark.parametrize("as_loader", [True, False])
def test_on_accelerators_what_is_left_comes_in_powers_of_two(as_loader) -> None:
    data = ft.ArrayLoader(np.arange(2 * 23), 2) if as_loader else batches(*[2] * 23)
    assert rows(Feed(data, 8, chip=ACCELERATOR)) == [(n, n) for n in (8, 8, 4, 2, 1)]
    # K itself need not be one.
    assert rows(Feed(data, 9, chip=ACCELERATOR)) == [(n, n) for n in (9, 9, 4, 1)]
    assert rows(Feed(data, 23, chip=ACCELERATOR)) == [(23, 23)]


@pytest.mark.parametrize("k", range(1, 20))
@pytest.mark.parametrize("length", [1, 7, 31, 40])
def test_on_accelerators_few_lengths_make_up_every_epoch(k: int, length: int) -> None:
    found = rows(Feed(ft.ArrayLoader(np.arange(length), 1), k, chip=ACCELERATOR))
    assert sum(steps for steps, _ in found) == length
    assert all(steps == rows for steps, rows in found), "no chunk has rows that are not used"
    lengths = {steps for steps, _ in found} - {min(k, length)}
    assert all(n & (n - 1) == 0 for n in lengths)


def test_on_accelerators_a_chunk_ends_where_something_is_due() -> None:
    data = ft.ArrayLoader(np.arange(24), 2)
    feed = Feed(data, 8, boundaries=[ft.every(steps=7)], chip=ACCELERATOR)
    # Seven steps are 4 + 2 + 1; the five that are left are 4 + 1.
    assert [steps for steps, _ in rows(feed)] == [4, 2, 1, 4, 1]


def test_on_accelerators_an_epoch_of_unknown_length_ends_with_unused_rows() -> None:
    found = rows(Feed(iter(batches(*[2] * 11)), 4, chip=ACCELERATOR))
    assert found == [(4, 4), (4, 4), (3, 4)]


def test_on_accelerators_a_smaller_last_batch_has_a_chunk_to_itself() -> None:
    feed = Feed(ft.ArrayLoader(np.arange(23), 2), 4, chip=ACCELERATOR)
    assert sizes(feed) == [(4, 2), (4, 2), (2, 2), (1, 2), (1, 1)]


def test_on_accelerators_auto_is_limited_by_the_time_of_a_program() -> None:
    def steps(state_bytes: int) -> int:
        return auto_steps(1, state_bytes, chip=ACCELERATOR)

    assert steps(0) == MAX_STEPS
    for seconds in (40e-6, 4e-3, 10e-3):
        # A step reads its state and writes it.
        state_bytes = int(seconds * ACCELERATOR.bandwidth / 2)
        assert steps(state_bytes) == min(MAX_STEPS, int(PROGRAM_SECONDS / seconds))
    assert steps(100 * 2**30) == MIN_STEPS


def test_on_accelerators_auto_is_limited_by_the_memory_and_not_by_a_processors_cache() -> None:
    room = int(CHUNK_PART * ACCELERATOR.memory_bytes)
    for k in (1, 5, 100):
        assert auto_steps(room // k, 0, chip=ACCELERATOR) == k
    assert auto_steps(room // 100, 0) < 100
    assert auto_steps(2 * room, 0, chip=ACCELERATOR) == 1


# -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("as_loader", [True, False])
def test_a_chunk_ends_where_something_is_due(as_loader) -> None:
    data = ft.ArrayLoader(np.arange(24), 2) if as_loader else batches(*[2] * 12)
    feed = Feed(data, 4, boundaries=[ft.every(steps=5)])
    assert [chunk.steps for chunk in feed.epoch(0)] == [4, 1, 4, 1, 2]
    # The second epoch begins after 12 steps of the run: three more until the next is due.
    assert [chunk.steps for chunk in feed.epoch(1, 12)] == [3, 4, 1, 4]
    assert {len(chunk.batches) for chunk in feed.epoch(0)} == {4}


# --- batches of several shapes -------------------------------------------------------------------


def lengths_and_rows(feed: Feed, *at: int) -> list[tuple[int, int, int]]:
    """Returns the examples, the steps and the rows of each chunk."""
    return [
        (example_count(chunk.batches, 1), chunk.steps, len(chunk.batches))
        for chunk in feed.epoch(*at)
    ]


def test_a_chunk_has_one_shape_and_a_run_of_batches_is_stacked() -> None:
    feed = Feed(iter(batches(*[4] * 20, *[2] * 20, *[4] * 3)), 16)
    # The second shape is stacked after two batches, an eighth of K.
    found = [(4, 16, 16), (4, 4, 16), (2, 1, 1), (2, 1, 1), (2, 16, 16), (2, 2, 16), (4, 3, 16)]
    assert lengths_and_rows(feed) == found


def test_batches_that_change_their_shapes_often_are_not_padded() -> None:
    feed = Feed(iter(batches(*[4, 2, 3] * 5, 4, 4, 4, 4)), 16)
    (first, *others) = lengths_and_rows(feed)
    # Nothing told that the first batch would be alone.
    assert first == (4, 1, 16)
    assert others == [(n, 1, 1) for n in [2, 3, *[4, 2, 3] * 4, 4, 4]] + [(4, 2, 16)]


def test_a_run_goes_on_in_the_next_epoch() -> None:
    # A pass of 20 batches and a smaller one: epochs of 22 steps end within a pass.
    feed = Feed(ft.ArrayLoader(np.arange(4 * 20 + 2), 4), 16)
    feed.batches = EpochsOfSteps(feed.batches, 22)
    assert lengths_and_rows(feed) == [(4, 16, 16), (4, 4, 16), (2, 1, 1), (4, 1, 16)]
    assert lengths_and_rows(feed, 1) == [(4, 16, 16), (4, 3, 16), (2, 1, 1), (4, 2, 16)]


@pytest.mark.parametrize("k", [1, 2, 8, 16])
@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("chip", [None, ACCELERATOR])
def test_all_batches_come_in_order_in_few_programs(k, seed, chip) -> None:
    rng = np.random.default_rng(seed)
    data = batches(*np.repeat(rng.integers(1, 4, 12), rng.integers(1, 40, 12)))
    chunks = list(Feed(iter(data), k, boundaries=[ft.every(steps=7)], chip=chip).epoch())
    found = [row for chunk in chunks for row in chunk.batches[: chunk.steps]]
    for x, y in zip(found, data, strict=True):
        np.testing.assert_array_equal(x, y)
    if chip is None:
        assert len({chunk.batches.shape for chunk in chunks}) <= 2 * 3


@pytest.mark.parametrize(
    ("odd", "message"),
    [
        (np.zeros(4, np.int32), r"\(root\): expected float32\[4\], got int32\[4\]"),
        (np.zeros((4, 1), np.float32), r"expected float32\[4\], got float32\[4, 1\]"),
        ({"x": np.zeros(4, np.float32)}, "x: unexpected"),
    ],
)
def test_a_batch_unlike_the_first_is_refused_with_its_place(odd, message) -> None:
    good = np.zeros(4, np.float32)
    feed = Feed([good, good, odd], 2)
    with pytest.raises(ValueError, match=rf"(?s)another at step 2 of epoch 0.*{message}"):
        sizes(feed)


def test_what_came_before_an_error_of_the_source_is_handed_out_first() -> None:
    def failing():
        yield from batches(4, 4, 4)
        raise OSError("disk on fire")

    found = Feed(failing(), 2).epoch()
    assert [next(found).steps, next(found).steps] == [2, 1]
    with pytest.raises(OSError, match="disk on fire"):
        next(found)


def test_a_loader_makes_each_batch_once() -> None:
    loader, made = ft.ArrayLoader(np.arange(24), 2), []
    chunk, batch = loader.chunk, loader.batch
    loader.chunk = lambda epoch, start, k, pad_to: (
        made.extend(range(start, start + k)) or chunk(epoch, start, k, pad_to)
    )
    loader.batch = lambda epoch, index: made.append(index) or batch(epoch, index)
    sizes(Feed(loader, 5))
    assert made == list(range(12))


@pytest.mark.parametrize("fuse", [0, -1, 1.5, "never", True, None])
def test_a_fuse_below_one_is_refused(fuse) -> None:
    with pytest.raises(ValueError, match="fuse: expected 'auto' or a whole number of steps"):
        Feed([np.zeros(1)], fuse)


@pytest.mark.parametrize("fuse", [500, 10**12])
def test_a_program_has_no_more_steps_than_there_are_between_two_pauses(fuse) -> None:
    plan = Plan(fuse, intervals=lambda: [None, 7, 9])
    assert plan.group_of(np.zeros((8, 3), np.float32)).k == 7


def test_a_program_has_no_more_steps_than_half_of_the_memory_has_room_for() -> None:
    plan = Plan(machine_memory() // 2000)
    assert plan.group_of(np.zeros(1, np.uint8)).k == plan.fuse
    assert plan.group_of(np.zeros(10**6, np.uint8)).k == machine_memory() // (2 * 10**6)


def test_a_program_has_no_more_steps_than_a_quarter_of_an_accelerator_has_room_for() -> None:
    plan = Plan(10**6, chip=ACCELERATOR)
    assert plan.group_of(np.zeros(2**20, np.uint8)).k == ACCELERATOR.memory_bytes // 2**22
