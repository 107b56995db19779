"""When a run saves itself, what it says of that, and what it is when it is over."""

import pathlib
import warnings
from typing import Any

import jax.numpy as jnp
import numpy as np
import optax
import pytest

import functrain as ft
from functrain.common import _tree
from tests.conftest import digest

DATA = ft.ArrayLoader(np.arange(20, dtype=np.float32), 2, shuffle=True)  # ten steps an epoch


def step(state: Any, batch: Any) -> Any:
    return {"w": 0.9 * state["w"] + batch.mean()}, {"mean": batch.mean()}


def trained(
    checkpointer: Any, *hooks: Any, epochs: int = 3, fuse: int = 4, verbose: Any = 0
) -> Any:
    return ft.fit(
        {"w": jnp.zeros(2)},
        step,
        DATA,
        epochs=epochs,
        checkpointer=checkpointer,
        hooks=hooks,
        fuse=4,
        verbose=verbose,
    )


def scored(*values: float) -> Any:
    """A hook that gives each epoch a value."""

    @ft.every(epochs=1)
    def score(event: Any) -> None:
        event.values["val_loss"] = values[event.epoch]

    return score


def leave_at(step: int) -> Any:
    """A hook that leaves in the midst of a run."""

    @ft.at(step)
    def leave(event: Any) -> None:
        raise SystemExit

    return leave


@pytest.mark.parametrize(
    ("when", "saved"),
    [
        (ft.every(epochs=1), [10, 20, 30]),
        (ft.every(epochs=2), [20, 30]),
        (ft.every(steps=7), [7, 14, 21, 28, 30]),
        (ft.at(3, 10, 11), [3, 10, 11, 30]),
        (ft.every(seconds=1e-9), [4, 8, 10, 14, 18, 20, 24, 28, 30]),
        (ft.every(seconds=1e9), [30]),
    ],
    ids=str,
)
def test_a_run_saves_itself_when_that_is_due_and_at_its_end(
    when: Any, saved: list[int], tmp_path: pathlib.Path
) -> None:
    checkpointer = ft.Checkpointer(tmp_path, every=when, keep=None)
    trained(checkpointer)
    assert checkpointer.steps() == saved


@pytest.mark.parametrize(
    ("values", "best"),
    [((0.3, 0.2, 0.1), 30), ((0.1, 0.2, 0.3), 10), ((float("nan"), 0.2, float("nan")), 20)],
    ids=str,
)
@pytest.mark.parametrize("when", [ft.every(epochs=1), ft.every(seconds=1e9)], ids=str)
def test_the_best_epoch_is_kept_due_or_not(
    values: Any, best: int, when: Any, tmp_path: pathlib.Path
) -> None:
    checkpointer = ft.Checkpointer(tmp_path, every=when, keep=1, monitor="val_loss")
    trained(checkpointer, scored(*values))
    assert checkpointer.best() == best
    assert checkpointer.steps() == sorted({best, 30})
    like = {"w": np.zeros(2, np.float32)}
    assert checkpointer.restore(like, best).values["val_loss"] == values[best // 10 - 1]


def may_add_values(event: Any) -> None:
    """A function, of which nobody knows beforehand that it does not."""


def test_a_best_value_that_no_epoch_has_is_named(tmp_path: pathlib.Path) -> None:
    checkpointer = ft.Checkpointer(tmp_path, monitor="val_loss")
    words = r"monitor: expected one of \['mean'\], got 'val_loss'"
    with pytest.warns(UserWarning, match=words) as caught:
        trained(checkpointer, may_add_values)
    assert [warning.filename for warning in caught] == [__file__]
    assert checkpointer.best() is None
    assert checkpointer.steps() == [10, 20, 30]


def test_too_few_epochs_are_refused_with_the_directory_that_goes_on(tmp_path: pathlib.Path) -> None:
    with pytest.raises(SystemExit):
        trained(ft.Checkpointer(tmp_path), leave_at(25))
    expected = f"epochs: expected more than the 2 that are over at step 20, from which {tmp_path}"
    with pytest.raises(ValueError, match=expected):
        trained(ft.Checkpointer(tmp_path), epochs=2 - 1)


def test_an_error_names_the_directory_that_goes_on(tmp_path: pathlib.Path) -> None:
    with pytest.raises(SystemExit) as caught:
        trained(ft.Checkpointer(tmp_path), leave_at(25))
    assert caught.value.__notes__[-1] == f"The same call of fit resumes after step 20: {tmp_path}"

    with pytest.raises(SystemExit) as caught:
        trained(ft.Checkpointer(tmp_path / "other"), leave_at(8))
    assert not any("resumes" in note for note in caught.value.__notes__)


def test_a_training_that_is_over_says_so_and_returns_what_it_came_to(
    tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    first = trained(ft.Checkpointer(tmp_path), verbose="lines")
    shown = capsys.readouterr().out
    again = trained(ft.Checkpointer(tmp_path), verbose="lines")
    assert [line.split("  ")[0] for line in shown.splitlines()] == [
        "epoch 1/3",
        "epoch 2/3",
        "epoch 3/3",
    ]
    assert capsys.readouterr().out == (
        f"already finished, after 30 steps: {tmp_path}. To continue, pass more epochs or "
        "steps; or use another directory.\n"
    )
    assert digest((again.state, again.history.steps, again.history.epochs)) == digest(
        (first.state, first.history.steps, first.history.epochs)
    )


def test_more_epochs_are_those_of_one_training(
    tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    straight = trained(None)
    for epochs in (1, 2):
        trained(ft.Checkpointer(tmp_path), epochs=epochs)
    capsys.readouterr()
    more = trained(ft.Checkpointer(tmp_path), verbose="lines")
    said = capsys.readouterr().out.splitlines()
    assert said[0] == f"resuming after 20 steps, in epoch 3: {tmp_path}"
    assert said[1].startswith("epoch 3/3  10 steps")
    assert digest((more.state, more.history.steps)) == digest(
        (straight.state, straight.history.steps)
    )


def test_a_run_that_was_stopped_stays_so_and_says_how_to_begin_anew(
    tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    @ft.at(14)
    def stop(event: Any) -> None:
        event.stop()

    first = trained(ft.Checkpointer(tmp_path), stop)
    again = trained(ft.Checkpointer(tmp_path), epochs=9, verbose="lines")
    said = capsys.readouterr().out
    assert said.startswith("already finished, stopped early after 14 steps: ")
    assert "rollback" in said
    assert digest((again.state, again.history.steps)) == digest((first.state, first.history.steps))


def test_an_error_at_the_end_of_a_run_loses_no_step(tmp_path: pathlib.Path) -> None:
    ends: list[int] = []

    def test(event: Any) -> None:
        if isinstance(event, ft.events.RunEnd):
            ends.append(event.step)
            if len(ends) == 1:
                raise KeyError

    checkpointer = ft.Checkpointer(tmp_path)
    with pytest.raises(KeyError):
        trained(checkpointer, test, epochs=1)
    assert checkpointer.steps() == [10]
    again, straight = trained(checkpointer, test, epochs=1), trained(None, epochs=1)
    assert ends == [10, 10]
    assert digest((again.state, again.history.steps)) == digest(
        (straight.state, straight.history.steps)
    )


@pytest.mark.parametrize("every", [14, ft.every(epochs=1)])
@pytest.mark.parametrize("adds", ["the first", "another", ""])
def test_a_resumed_run_may_have_other_metrics(tmp_path: pathlib.Path, every: Any, adds) -> None:
    def loss_fn(params: Any, model_state: Any, batch: Any, *, rng: Any, training: bool) -> Any:
        return (params * batch).mean(), ft.Aux(model_state)

    tx = optax.sgd(0.1)
    plain = ft.train_step(loss_fn, tx)
    metered = ft.train_step(loss_fn, tx, metrics={"again": ft.metrics.mean_loss()})
    other = ft.train_step(loss_fn, tx, metrics={"other": ft.metrics.mean_loss()})

    def fit(step: Any, *hooks: Any, **how: Any) -> Any:
        state = ft.TrainState.create(params=jnp.ones(()), tx=tx)
        return ft.fit(state, step, DATA, epochs=3, hooks=hooks, verbose=0, **how)

    whole = fit(metered)
    before = {"the first": plain, "another": other, "": metered}[adds]
    after = metered if adds else plain
    with pytest.raises(SystemExit):
        fit(before, leave_at(15), checkpointer=ft.Checkpointer(tmp_path, every=every))
    with warnings.catch_warnings(record=True, action="always") as caught:
        state, history = fit(after, checkpointer=ft.Checkpointer(tmp_path, every=every))
    assert state.params == whole.state.params
    np.testing.assert_array_equal(history.epochs["loss"], whole.history.epochs["loss"])
    # Metrics of an epoch that began without them are not of all of its batches.
    is_partial = bool(adds) and every == 14
    assert any("remaining batches" in str(w.message) for w in caught) == is_partial
    if adds:
        complete = slice(2 if is_partial else 1, None)
        expected = whole.history.epochs["again"][complete]
        np.testing.assert_array_equal(history.epochs["again"][complete], expected)


def test_events_of_a_run_that_is_over_are_its_end(tmp_path: pathlib.Path) -> None:
    def run() -> Any:
        state = {"w": jnp.zeros(2)}
        return ft.run(state, step, DATA, epochs=2, checkpointer=ft.Checkpointer(tmp_path))

    *_, last = run()
    events = run()
    assert events.resumed.finished
    (end,) = events
    assert isinstance(end, ft.events.RunEnd)
    assert not end.was_stopped
    assert (end.position, digest(end.state)) == (last.position, digest(last.state))


def test_a_run_that_resumes_makes_no_copy_of_the_state_it_was_given(tmp_path, monkeypatch) -> None:
    trained(ft.Checkpointer(tmp_path), epochs=1)
    copied, copy = [], _tree.copy

    def counting(tree: Any) -> Any:
        if not _tree.is_in_jit():  # where it only finds out the shapes
            copied.append(tree)
        return copy(tree)

    monkeypatch.setattr(_tree, "copy", counting)
    resumed = trained(ft.Checkpointer(tmp_path), epochs=2)
    assert copied == []
    trained(ft.Checkpointer(tmp_path / "anew"), epochs=2)
    assert len(copied) == 1
    straight = trained(None, epochs=2)
    assert digest(resumed.state) == digest(straight.state)
