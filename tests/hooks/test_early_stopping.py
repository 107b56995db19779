import re
import types

import hypothesis
import jax.numpy as jnp
import keras
import numpy as np
import pytest
from hypothesis import strategies as st

import functrain as ft
from functrain.hooks import EarlyStopping, Evaluate

from ..conftest import digest
from .fits import EVAL, LOADER, STEP, Scripted, fit, start


@pytest.mark.parametrize(
    ("name", "better"),
    [("val/top5_acc", 0.8), ("mid_f1", 0.8), ("val_accuracy_loss", 0.5), ("Val-MSE", 0.5)],
)
def test_the_name_tells_what_is_better(name, better) -> None:
    hook = EarlyStopping(name, patience=9)
    fit(Scripted(0.8, 0.5, 0.7, name=name), hook, epochs=3)
    assert hook.best == better


@pytest.mark.parametrize("restore_best", [False, True])
def test_the_last_state_is_kept_unless_the_best_is_asked_for_as_in_keras(restore_best) -> None:
    hook = EarlyStopping("val_accuracy", patience=1, restore_best=restore_best)
    state, _ = fit(Scripted(0.5, 0.8, 0.6, name="val_accuracy"), hook, epochs=4)
    assert (hook.best, hook.best_step, int(state.step)) == (0.8, 40, 40 if restore_best else 60)
    # Otherwise no second copy is on the device or in a checkpoint.
    assert bool(hook.state()["best_state"]) == restore_best


def epochs_of_keras(values, **how):
    """Returns after how many values Keras's callback stops, and its best epoch."""
    callback = keras.callbacks.EarlyStopping("score", restore_best_weights=True, **how)
    model = types.SimpleNamespace(stop_training=False, get_weights=list, set_weights=id)
    callback.set_model(model)
    callback.on_train_begin()
    for epoch, value in enumerate(values):
        callback.on_epoch_end(epoch, {"score": value})
        if model.stop_training:
            break
    return epoch + 1, callback.best_epoch


def epochs_of_ours(hook, state, values):
    for epoch, value in enumerate(values):
        at = ft.Position(step=epoch, epoch=epoch)
        event = ft.events.EpochEnd(position=at, state=state, values={"score": value})
        hook(event)
        state = event.state
        if event.stopped:
            break
    return epoch + 1


# Some are rounded in float32, in which Keras compares; some differ only beyond its precision.
SCORES = st.builds(lambda n, m: n / 10 - m * 1e-9, st.integers(-8, 8), st.integers(0, 2))
RULES = st.fixed_dictionaries(
    {
        "patience": st.integers(0, 3),
        "min_delta": st.sampled_from([0.0, 1e-9, 0.1, 0.5]),
        "mode": st.sampled_from(["min", "max"]),
        "baseline": st.none() | SCORES,
        "start_from_epoch": st.integers(0, 3),
    }
)


@hypothesis.given(values=st.lists(SCORES | st.just(np.inf), min_size=1, max_size=9), how=RULES)
@hypothesis.example(values=[0.5, 0.5], how={"patience": 0, "min_delta": 0.0, "mode": "min"})
@hypothesis.example(values=[0.5, 0.4, 0.5], how={"patience": 1, "mode": "min", "baseline": 0.3})
@hypothesis.example(values=[0.1, 0.5, 0.6], how={"patience": 1, "mode": "min", "baseline": 0.3})
@hypothesis.example(values=[0.1, 0.5, 0.4], how={"mode": "min", "start_from_epoch": 1})
@hypothesis.example(values=[0.5, 0.5], how={"patience": 1, "min_delta": 0.0, "mode": "max"})
@hypothesis.example(values=[0.5, 0.5 - 1e-9], how={"patience": 1, "min_delta": 0.0, "mode": "min"})
@hypothesis.example(values=[0.3, 0.2], how={"patience": 1, "min_delta": 0.1, "mode": "min"})
@hypothesis.settings(deadline=None, max_examples=80)
def test_it_stops_where_keras_stops_with_the_same_best_epoch(values, how) -> None:
    hook = EarlyStopping("score", **how)
    expected, best_epoch = epochs_of_keras(values, **how)
    assert epochs_of_ours(hook, (), values) == expected
    assert (hook.best_step or 0) == best_epoch

    members = ft.population.EarlyStopping("score", **how)
    of_each = [np.array([value, 0.0]) for value in values]  # the second never improves
    state = ft.population.stack([{"w": np.float32(0)}] * 2)
    counted = epochs_of_ours(members, state, of_each)
    stops_at = max(expected, epochs_of_keras([0.0] * len(values), **how)[0])
    assert counted == stops_at
    assert max(0, np.ravel(members.best_step)[0]) == best_epoch


@pytest.mark.parametrize("name", ["patience", "min_delta", "baseline", "start_from_epoch"])
def test_settings_that_are_no_numbers_are_refused(name) -> None:
    with pytest.raises(ValueError, match=f"{name}: expected a number.*got '3'"):
        EarlyStopping("val_loss", **{name: "3"})


def test_a_value_of_an_ignored_epoch_need_not_come_again() -> None:
    def at_first(event):
        if isinstance(event, ft.events.EpochEnd) and event.epoch == 0:
            event.values["score"] = 1.0

    hook = EarlyStopping("score", mode="min", start_from_epoch=2)
    assert len(fit(at_first, hook, epochs=4).history.epochs["loss"]) == 4


def test_a_first_value_of_nan_is_improved_by_any_number() -> None:
    hook = EarlyStopping("score", mode="min", patience=2)
    assert epochs_of_ours(hook, (), [np.nan, 0.5, 0.4, 0.6, 0.7]) == 5
    assert (hook.best, hook.best_step) == (0.4, 2)
    nothing_but_nan = EarlyStopping("score", mode="min", patience=2)
    expected, _ = epochs_of_keras([np.nan] * 5, mode="min", patience=2)
    assert epochs_of_ours(nothing_but_nan, (), [np.nan] * 5) == expected


@pytest.mark.parametrize("name", ["score", "val_width", "lossy"])
def test_a_name_that_does_not_tell_is_refused(name) -> None:
    with pytest.raises(ValueError, match=rf"mode: expected 'min' or 'max' for '{name}'"):
        EarlyStopping(name)
    EarlyStopping(name, mode="max")


def test_a_value_of_every_other_epoch_is_waited_for() -> None:
    stopping = EarlyStopping("val_loss")
    _, history = fit(Evaluate(EVAL, LOADER, every=ft.every(epochs=2)), stopping, epochs=4)
    assert np.isfinite(history.epochs["val_loss"]).tolist() == [False, True, False, True]
    assert stopping.best == history.epochs["val_loss"][3]


def test_a_value_of_the_end_of_the_run_is_none_to_stop_at() -> None:
    hook = EarlyStopping("score", mode="max", restore_best=True)

    def at_every_event(event):
        event.values["score"] = -event.step

    assert fit(at_every_event, hook).state.step == hook.best_step < 60


def test_a_value_that_no_hook_has_added_is_named_at_the_end() -> None:
    with pytest.warns(UserWarning, match="EarlyStopping: expected a value 'val_loss'"):
        fit(Scripted(1.0, 2.0, 3.0), EarlyStopping("val_loss"))


@pytest.mark.parametrize("cut", [1, 2, 3, 4])
def test_stopped_and_restored_it_decides_as_uninterrupted(cut) -> None:
    scores = [0.9, 0.5, 0.7, 0.6, 0.8, 0.1]
    how = {"mode": "min", "patience": 3, "restore_best": True}
    whole = EarlyStopping("loss_of", **how)
    expected, history = fit(Scripted(*scores, name="loss_of"), whole, epochs=6)
    assert len(history.epochs["loss_of"]) == 5

    first = EarlyStopping("loss_of", **how)
    for event in ft.run(start(), STEP, LOADER, epochs=cut):
        if isinstance(event, ft.events.EpochEnd):
            middle, position = event.state, event.position
            event.values["loss_of"] = scores[event.epoch]
            first(event)
    again = EarlyStopping("loss_of", **how)
    again.restore(first.state())
    rest = Scripted(*scores[cut:], name="loss_of")
    state, history = fit(rest, again, state=middle, start=position, epochs=6)
    assert len(history.epochs["loss_of"]) == 5 - cut
    assert (again.best, again.best_step) == (whole.best, whole.best_step)
    assert digest(state) == digest(expected)


def test_the_best_state_is_looked_for_anew_where_a_checkpoint_has_none(tmp_path) -> None:
    def train(restore_best, *scores):
        hook = EarlyStopping("score", mode="min", patience=9, restore_best=restore_best)
        checkpointer = ft.Checkpointer(tmp_path)
        epochs = 2 if not restore_best else 4
        return fit(Scripted(*scores), hook, epochs=epochs, checkpointer=checkpointer), hook

    train(False, 0.1, 0.5)
    (state, _), hook = train(True, 0.3, 0.4)
    assert (hook.best, hook.best_step, int(state.step)) == (0.3, 60, 60)


def test_a_best_state_is_not_kept_where_it_is_not_restored() -> None:
    saving = EarlyStopping("score", mode="min", restore_best=True)
    epochs_of_ours(saving, {"w": np.ones(2)}, [0.5])
    again = EarlyStopping("score", mode="min")
    again.restore(saving.state())
    assert again.state()["best_state"] == []


def test_hooks_are_shown_with_their_settings() -> None:
    shown = repr(EarlyStopping("auc", patience=3))
    assert shown.startswith("EarlyStopping(monitor='auc', patience=3, min_delta=0.0, mode='max',")
    shown = repr(Evaluate(EVAL, LOADER, every=ft.every(epochs=2)))
    assert re.fullmatch(r"Evaluate\(.*data=ArrayLoader\(.*every=every\(epochs=2\), .*\)", shown)


def test_a_schedule_leaves_out_values_but_not_the_best_state() -> None:
    scores = Scripted(0.0, 3.0, 0.0, 5.0, 0.0, 4.0)
    hook = EarlyStopping("score", mode="min", patience=2, restore_best=True)
    state, history = fit(scores, ft.every(epochs=2)(hook), epochs=9)
    assert (hook.best, len(history.epochs["score"])) == (3.0, 6)
    assert digest(state) == digest(fit(epochs=2).state)


def test_a_scheduled_check_of_nan_warns_at_the_end() -> None:
    check = ft.every(epochs=1)(ft.hooks.TerminateOnNaN())
    with pytest.warns(UserWarning, match="TerminateOnNaN: 'loss' was not finite"):
        fit(check, state=start().replace(params={"w": jnp.full(3, np.nan)}), epochs=3)
