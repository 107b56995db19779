import jax
import jax.numpy as jnp
import numpy as np
import pytest

import functrain as ft


def step(state, batch):
    return jnp.tanh(state @ batch[0]), {"sum": jnp.sum(state)}


def train(*hooks, fuse=4):
    data = ft.ArrayLoader(np.ones((20, 8, 8), np.float32), 1)
    return ft.fit(jnp.ones((8, 8)), step, data, hooks=hooks, fuse=fuse, verbose=0)


def steps_in(directory) -> int:
    """How many steps a trace shows, by the profiler's own reader: each takes one tanh."""
    [path] = directory.glob("plugins/profile/*/*.xplane.pb")
    return sum(
        event.name == "wrapped_tanh"
        for plane in jax.profiler.ProfileData.from_file(str(path)).planes
        for line in plane.lines
        for event in line.events
    )


@pytest.mark.parametrize("fuse", [1, 4])
def test_a_trace_holds_the_chosen_steps_and_no_others(fuse, tmp_path) -> None:
    train(ft.hooks.Profile(tmp_path, start=5, steps=6), fuse=fuse)
    assert steps_in(tmp_path) == 6


def test_a_trace_ends_with_the_run(tmp_path) -> None:
    train(ft.hooks.Profile(tmp_path, start=18, steps=50))
    assert steps_in(tmp_path) == 2


def test_a_run_that_fails_leaves_its_trace_and_none_under_way(tmp_path) -> None:
    @ft.at(9)
    def fail(event):
        raise KeyError

    with pytest.raises(KeyError):
        train(ft.hooks.Profile(tmp_path / "a", start=5, steps=6), fail)
    assert steps_in(tmp_path / "a") == 4
    train(ft.hooks.Profile(tmp_path / "b", start=5, steps=6))
    assert steps_in(tmp_path / "b") == 6


def test_steps_that_make_no_sense_are_refused() -> None:
    with pytest.raises(ValueError, match="start: expected an integer of at least 1, got 0"):
        ft.hooks.Profile("profile", start=0)
