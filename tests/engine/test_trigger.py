import jax.numpy as jnp
import numpy as np
import pytest

import functrain as ft


class Stuck:
    """A trigger whose next step is always the same."""

    def __init__(self, due_step):
        self.due_step = due_step

    def next_step(self, step):
        return self.due_step

    def due(self, step, epoch, seconds):
        return False

    def __repr__(self):
        return "Stuck"


@pytest.mark.parametrize("due_step", [0, -3, 1.5, "2"])
def test_a_trigger_that_does_not_advance_is_refused(due_step) -> None:
    loader = ft.ArrayLoader(np.ones((8, 1), np.float32), 2)
    message = rf"every: expected a step after 0, or None, .*\(0\) of Stuck, got {due_step!r}"
    with pytest.raises(ValueError, match=message):
        list(ft.run(jnp.zeros(()), lambda s, b: (s, {}), loader, boundaries=[Stuck(due_step)]))


@pytest.mark.parametrize("seconds", [float("nan"), float("inf"), 0, -1.0, "3", True])
def test_seconds_are_a_positive_finite_number(seconds) -> None:
    with pytest.raises(ValueError, match="expected a positive, finite number of seconds, got"):
        ft.every(seconds=seconds)


def test_triggers_are_shown_as_they_are_written() -> None:
    assert repr(ft.every(steps=3)) == "every(steps=3)"
    assert repr(ft.every(seconds=0.5)) == "every(seconds=0.5)"
    assert repr(ft.at(30, 1)) == "at(1, 30)"


@pytest.mark.parametrize(
    ("due", "longest"),
    [
        ([ft.at(1)], 25),
        ([ft.at(1, 5), ft.every(steps=9)], 9),
        ([ft.every(steps=4), ft.every(steps=9)], 4),
        ([ft.every(epochs=1)], 25),
    ],
)
def test_programs_are_as_long_as_the_longest_stretch_without_a_pause(due, longest) -> None:
    loader = ft.ArrayLoader(np.ones((50, 1), np.float32), 2)
    events = ft.run(jnp.zeros(()), lambda s, b: (s, {"s": s}), loader, boundaries=due)
    assert {len(e.rows["s"]) for e in events if isinstance(e, ft.events.ChunkEnd)} == {longest}
