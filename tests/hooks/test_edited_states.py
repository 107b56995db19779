"""States that hooks replace, or change in place."""

import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import functrain as ft

from ..conftest import digest
from .fits import LOADER, STEP, TX, loss_fn, start


def count(state: Any, batch: Any) -> Any:
    return jax.tree.map(lambda x: x + 1, state), {}


@pytest.mark.parametrize(
    ("due", "state", "message"),
    [
        (ft.events.ChunkEnd, {"w": jnp.zeros((3, 2))}, r"w: expected float32\[3\]"),
        (ft.events.RunEnd, "junk", "expected a state with the structure"),
    ],
)
def test_a_state_that_does_not_fit_is_refused_by_leaf(due, state, message) -> None:
    def replace(event):
        if isinstance(event, due):
            event.state = state

    with pytest.raises(ValueError, match=rf"(?s)event\.state.*{message}"):
        ft.fit({"w": jnp.zeros(3)}, count, ft.NoData(2), hooks=[replace], verbose=0)


def test_a_state_changed_in_place_is_named_by_its_missing_leaf() -> None:
    def remove(event):
        event.state["count"] = None

    with pytest.raises(ValueError, match=r"(?s)event\.state: .* got\n  count: missing"):
        ft.fit({"count": 0}, count, ft.NoData(3), fuse=1, hooks=[remove], verbose=0)


def test_a_run_goes_on_from_an_edited_state_with_a_copy_of_it() -> None:
    mine = start()
    events = ft.run(start(), STEP, LOADER, fuse=8)
    for event in itertools.islice(events, 1):
        event.state = mine
    next(events)
    assert not any(x.is_deleted() for x in jax.tree.leaves(mine))


# States with containers that can be changed, and the container and the key of a leaf.
MUTABLE = {
    "dict": (lambda: {"w": jnp.zeros(3), "n": jnp.zeros(())}, lambda state: (state, "w")),
    "list in a tuple": (lambda: ([jnp.zeros(3)], jnp.zeros(())), lambda state: (state[0], 0)),
    "TrainState": (
        lambda: ft.TrainState.create(params={"w": jnp.zeros(3)}, tx=optax.sgd(1.0)),
        lambda state: (state.params, "w"),
    ),
}


@pytest.mark.parametrize(
    "leaf",
    [jnp.full(3, 5.0), jnp.full(3, np.float32(5)), np.full(3, 5.0)],
    ids=["weak", "jax", "numpy"],
)
@pytest.mark.parametrize("kind", MUTABLE)
def test_a_leaf_that_is_assigned_in_place_stays_the_user_s(kind, leaf) -> None:
    make, container_of = MUTABLE[kind]

    def assign(state, value):
        container, key = container_of(state)
        container[key] = value

    given = make()
    before = digest(given)
    for event in ft.run(given, count, ft.NoData(4), fuse=1):
        if isinstance(event, ft.events.ChunkEnd) and event.step == 2:
            assign(event.state, leaf)
    expected = jax.tree.map(lambda x: x + 4, given)
    assign(expected, jnp.full(3, 7.0, jnp.float32))
    assert digest(event.state) == digest(expected)
    np.testing.assert_array_equal(leaf, 5.0)  # neither donated nor changed
    assert digest(given) == before


@pytest.mark.parametrize("fuse", [1, 7])
def test_an_assignment_in_place_keeps_the_metrics_of_the_epoch(fuse) -> None:
    step = ft.train_step(loss_fn, TX, metrics={"running": ft.metrics.mean_loss()})
    zeros = jnp.zeros(3)

    def in_place(event):
        event.state.params["w"] = zeros

    def replaced(event):
        event.state = event.state.replace(params={"w": zeros})

    digests = set()
    for reset in (in_place, replaced):
        hooks = [ft.at(3, 15)(reset)]
        state, history = ft.fit(start(), step, LOADER, fuse=fuse, hooks=hooks, verbose=0)
        epochs = {name: x for name, x in history.epochs.items() if name != "seconds"}
        digests.add(digest((state, history.steps, epochs)))
    assert len(digests) == 1
    assert not zeros.is_deleted()


@pytest.mark.parametrize("donate", [True, False])
def test_the_containers_passed_to_a_run_are_not_those_of_its_events(donate) -> None:
    given = {"w": jnp.zeros(3)}
    for event in ft.run(given, lambda s, b: (s, {}), ft.NoData(2), fuse=1, donate=donate):
        event.state["w"] = jnp.ones(3)
    np.testing.assert_array_equal(event.state["w"], 1.0)
    assert given["w"].is_deleted() if donate else not given["w"].any()


@pytest.mark.parametrize("how", [{}, {"jit": False}, {"fuse": 3}], ids=str)
def test_a_state_that_a_hook_donates_has_to_be_replaced(how) -> None:
    train_on = jax.jit(STEP, donate_argnums=0)

    def donate(event):
        train_on(event.state, LOADER.batch(0, 0))

    def replace(event):
        event.state, _ = train_on(event.state, LOADER.batch(0, 0))

    with pytest.raises((RuntimeError, ValueError), match="deleted") as got:
        ft.fit(start(), STEP, LOADER, hooks=[ft.at(3)(donate)], verbose=0, **how)
    assert "Nothing is left of the 3 steps" in "".join(got.value.__notes__)
    state, _ = ft.fit(start(), STEP, LOADER, hooks=[ft.at(3)(replace)], verbose=0, **how)
    assert state.step == len(LOADER) + 1


def test_an_assignment_in_place_that_does_not_fit_leaves_the_state_of_the_run() -> None:
    events = ft.run({"w": jnp.zeros(3)}, count, ft.NoData(3), fuse=1)
    next(events).state["w"] = jnp.zeros(2)
    with pytest.raises(ValueError, match=r"w: expected float32\[3\], got float32\[2\]"):
        next(events)
    state, position = events.last_complete_state()
    np.testing.assert_array_equal(state["w"], 1.0)
    assert position.step == 1


def test_an_assignment_in_place_at_the_end_does_not_change_what_a_longer_run_resumes(
    tmp_path,
) -> None:
    def reset(event):
        if isinstance(event, ft.events.RunEnd):
            event.state["w"] = jnp.full(3, -1.0)

    def train(epochs):
        hooks = [reset] if epochs == 1 else []
        how = {"epochs": epochs, "hooks": hooks, "checkpointer": ft.Checkpointer(tmp_path)}
        return ft.fit({"w": jnp.zeros(3)}, count, ft.NoData(3), verbose=0, **how).state["w"]

    np.testing.assert_array_equal(train(1), -1.0)
    np.testing.assert_array_equal(train(1), -1.0)  # the final state is restored
    np.testing.assert_array_equal(train(2), 6.0)
