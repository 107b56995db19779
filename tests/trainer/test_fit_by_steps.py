"""A fit by steps: stretches of steps are what epochs are elsewhere."""

import contextlib
import itertools
from typing import Any

import jax.numpy as jnp
import numpy as np
import optax
import pytest

import functrain as ft
from functrain.checkpoint._errors import CheckpointMismatchError

from ..conftest import digest

X = np.random.default_rng(0).normal(size=(26, 3)).astype(np.float32)
TX = optax.adam(0.1)


def loss_fn(params: Any, model_state: Any, batch: Any, *, rng: Any, training: bool) -> Any:
    loss = jnp.mean((batch @ params["w"] - 1) ** 2)
    return loss, ft.Aux(model_state, batch)


STEP = ft.train_step(loss_fn, TX, metrics={"running": ft.metrics.mean_loss()})
EVAL = ft.eval_step(loss_fn)


def loader() -> ft.ArrayLoader:
    return ft.ArrayLoader(X, 4, shuffle=True, seed=3)  # 7 steps a pass, the last one smaller


class Batches:
    """Something that can be iterated again, and does not know how long it is."""

    def __iter__(self):
        return (loader().batch(0, i) for i in range(7))


class Endless:
    """An iterator without end that says where it is."""

    def __init__(self):
        self.n = 0

    def __iter__(self):
        return self

    def __next__(self):
        self.n += 1
        return X[(self.n - 1) % 20 :][:4]

    def state_dict(self):
        return {"n": self.n}

    def load_state_dict(self, state):
        self.n = state["n"]


def generator():
    for i in itertools.count():
        yield X[i % 20 :][:4]


def fit(data: Any, *hooks: Any, **how: Any) -> Any:
    state = ft.TrainState.create(params={"w": jnp.zeros(3)}, tx=TX)
    return ft.fit(state, STEP, data, hooks=hooks, **{"fuse": 4, "verbose": 0, **how})


def bits(result: Any) -> str:
    state, history = result
    epochs = {name: x for name, x in history.epochs.items() if name != "seconds"}
    return digest((state, history.steps, epochs, history.within_epochs))


HELD_OUT = {"eval_data": ft.ArrayLoader(X, 13), "eval_step": EVAL}


@pytest.mark.parametrize("data", [loader, lambda: [*Batches()], Batches])
def test_steps_that_make_up_passes_are_the_epochs_to_the_bit(data) -> None:
    by_steps = fit(data(), steps=21, steps_per_epoch=7, **HELD_OUT)
    assert bits(by_steps) == bits(fit(data(), epochs=3, **HELD_OUT))


@pytest.mark.parametrize("fuse", [1, 3, 40])
def test_stretches_cut_through_passes_and_train_on_the_same_batches(fuse) -> None:
    state, history = fit(loader(), steps=20, steps_per_epoch=5, fuse=fuse, **HELD_OUT)
    expected, by_epochs = fit(loader(), ft.at(20)(lambda event: event.stop()), epochs=3)
    assert digest(state) == digest(expected)
    assert digest(history.steps) == digest(by_epochs.steps)
    assert {name: len(values) for name, values in history.epochs.items()} == {
        "loss": 4,
        "running": 4,
        "val_loss": 4,
        "seconds": 4,
    }


def test_an_epoch_of_the_history_is_what_its_steps_were_and_the_state_after_them() -> None:
    seen = {}

    @ft.every(epochs=1)
    def look(event):
        seen[event.step] = ft.evaluate(event.state, EVAL, HELD_OUT["eval_data"])["loss"]
        assert event.position == ft.Position(event.step, event.step // 5 - 1, 5)

    _, history = fit(loader(), look, steps=15, steps_per_epoch=5, **HELD_OUT)
    assert history.epochs["val_loss"].tolist() == list(seen.values())
    assert list(seen) == [5, 10, 15]
    sizes = np.array(([4] * 6 + [2]) * 3, np.float64)[:15].reshape(3, 5)
    losses = history.steps["loss"].astype(np.float64).reshape(3, 5)
    expected = (losses * sizes).sum(1) / sizes.sum(1)
    np.testing.assert_allclose(history.epochs["loss"], expected, rtol=1e-12)
    np.testing.assert_allclose(history.epochs["running"], expected, rtol=1e-6)


@pytest.mark.parametrize("data", [generator, Endless])
def test_data_without_end_are_trained_on_for_so_many_steps(data, capsys) -> None:
    source = data()
    state, history = fit(source, steps=12, steps_per_epoch=6, verbose="lines", **HELD_OUT)
    assert int(state.step) == len(history.steps["loss"]) == 12
    lines = capsys.readouterr().out.splitlines()
    assert [line.split("  ")[:2] for line in lines] == [
        ["epoch 1/2", "6 steps"],
        ["epoch 2/2", "6 steps"],
    ]
    assert all("val_loss" in line for line in lines)
    np.testing.assert_array_equal(next(source), X[12:16])  # not a batch too many was taken


@pytest.mark.parametrize("data", [loader, lambda: [*Batches()], Batches])
def test_a_fit_goes_on_from_a_step(data) -> None:
    straight, whole = fit(data(), steps=20, steps_per_epoch=5)
    state, before = fit(data(), steps=10, steps_per_epoch=5)
    again = ft.fit(
        state, STEP, data(), steps=20, steps_per_epoch=5, start=ft.Position(10), fuse=4, verbose=0
    )
    assert digest(again.state) == digest(straight)
    losses = np.concatenate([before.steps["loss"], again.history.steps["loss"]])
    np.testing.assert_array_equal(losses, whole.steps["loss"])


DATA = {"loader": loader, "list": lambda: [*Batches()], "iterable": Batches}
DATA |= {"generator": generator, "resumable": Endless}


@pytest.mark.filterwarnings("ignore:data. (Batches|generator) does not report its position")
@pytest.mark.parametrize("cuts", [[2], [5], [7, 10], [11, 13, 14, 19], [20]], ids=str)
@pytest.mark.parametrize("kind", DATA)
def test_a_fit_that_was_killed_is_the_one_that_never_was(kind, cuts, tmp_path) -> None:
    def go(*hooks: Any) -> Any:
        saves = ft.Checkpointer(tmp_path, every=ft.every(steps=3))
        how = {"steps": 20, "steps_per_epoch": 5, "checkpointer": saves}
        return fit(DATA[kind](), *hooks, **how, **HELD_OUT)

    for step in cuts:

        @ft.at(step)
        def cut(event):
            raise KeyError

        with contextlib.suppress(KeyError):
            go(cut)
    assert bits(go()) == bits(fit(DATA[kind](), steps=20, steps_per_epoch=5, **HELD_OUT))


@pytest.mark.filterwarnings("ignore:data. (Batches|generator) does not report its position")
@pytest.mark.parametrize("cut", [None, 6])
@pytest.mark.parametrize("kind", DATA)
def test_more_steps_without_a_length_of_epochs_continue_too(kind, cut, tmp_path) -> None:
    def go(steps: int, *hooks: Any) -> Any:
        saves = ft.Checkpointer(tmp_path, every=ft.every(steps=2))
        return fit(DATA[kind](), *hooks, steps=steps, checkpointer=saves, **HELD_OUT)

    def fail(event: Any) -> None:
        raise KeyError

    with contextlib.suppress(KeyError):
        go(10, *([] if cut is None else [ft.at(cut)(fail)]))
    go(15)
    more = go(20)
    straight = fit(DATA[kind](), steps=20, **HELD_OUT)
    assert digest(more.state) == digest(straight.state)
    assert digest(more.history.steps) == digest(straight.history.steps)
    ends = [15, 20] if cut else [10, 15, 20]
    assert more.history.epoch_ends.tolist() == ends
    losses = [fit(DATA[kind](), steps=n, **HELD_OUT).history.epochs["val_loss"][0] for n in ends]
    assert more.history.epochs["val_loss"].tolist() == losses
    assert bits(go(20)) == bits(more)  # it is over


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ({"steps": 10}, {"steps": 20, "steps_per_epoch": 5}),
        ({"steps": 10, "steps_per_epoch": 5}, {"epochs": 2, "steps_per_epoch": 10}),
        ({"epochs": 2}, {"steps": 20}),
    ],
)
def test_epochs_of_another_length_are_refused_by_name(first, second, tmp_path) -> None:
    fit(loader(), **first, checkpointer=ft.Checkpointer(tmp_path))
    with pytest.raises(CheckpointMismatchError, match=r"(?s)expected the data of .*steps_per_epo"):
        fit(loader(), **second, checkpointer=ft.Checkpointer(tmp_path))


def stop(event: Any) -> None:
    event.stop()


@pytest.mark.parametrize(
    ("first", "second", "message"),
    [
        ({"epochs": 4}, {"epochs": 2}, "epochs: expected more than the 3 .* step 28, .*got 2"),
        ({"steps": 20}, {"steps": 15}, "steps: expected more than the 20 .* got 15"),
        ({"epochs": 4, "hooks": [ft.at(10)(stop)]}, {"epochs": 1}, "more than the 1 .* got 1"),
    ],
)
def test_fewer_epochs_than_a_run_has_had_are_refused(first, second, message, tmp_path) -> None:
    first, log = dict(first), tmp_path / "log.csv"
    hooks = first.pop("hooks", [])
    whole = fit(loader(), *hooks, ft.hooks.CSVLogger(log), **first, checkpointer=saves(tmp_path))
    text = log.read_text()
    with pytest.raises(ValueError, match=message):
        fit(loader(), ft.hooks.CSVLogger(log), **second, checkpointer=saves(tmp_path))
    assert log.read_text() == text
    again = fit(loader(), *hooks, ft.hooks.CSVLogger(log), **first, checkpointer=saves(tmp_path))
    assert bits(again) == bits(whole)


def saves(directory: Any) -> ft.Checkpointer:
    return ft.Checkpointer(directory / "run")


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ({"epochs": 2, "steps": 10}, "epochs and steps: expected one of them, got 2 and 10"),
        ({"epochs": -1}, "epochs: expected an integer of at least 0"),
        ({"steps_per_epoch": 0}, "steps_per_epoch: expected an integer of at least 1, got 0"),
        ({"epochs": 2, "steps_per_epoch": 2.5}, "steps_per_epoch: expected an integer"),
        (
            {"steps": 10, "steps_per_epoch": 4},
            "steps_per_epoch: expected a number that divides steps=10, got 4",
        ),
        ({"steps": 0}, "steps: expected an integer of at least 1"),
        ({"steps": 2.5}, "steps: expected an integer of at least 1"),
        ({"steps": 10, "start": ft.Position(10)}, "steps: expected more than the 10 that are over"),
    ],
)
def test_numbers_that_make_no_sense_are_refused(how, message) -> None:
    with pytest.raises(ValueError, match=message):
        fit(loader(), **how)


def test_an_iterator_that_ends_too_early_is_named_and_what_was_trained_is_kept() -> None:
    message = "data: expected 1 more batches in epoch 1, got the end of the data after 7"
    with pytest.raises(ValueError, match=message) as caught:
        fit(iter([*Batches()]), steps=8, steps_per_epoch=4)
    assert int(caught.value.fit_result.state.step) == 7


@pytest.mark.parametrize("data", [loader, lambda: [*Batches()], generator])
def test_epochs_of_a_given_length_are_the_same_training_as_steps(data) -> None:
    by_epochs = fit(data(), epochs=4, steps_per_epoch=5, **HELD_OUT)
    assert bits(by_epochs) == bits(fit(data(), steps=20, steps_per_epoch=5, **HELD_OUT))
