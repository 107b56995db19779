import jax
import keras
import numpy as np
import optax
import pytest

import functrain as ft
from functrain.hooks._hook import HookRunner

from ..conftest import digest
from .fits import EVAL, STEP, Scripted, start

X = np.random.default_rng(0).normal(size=(375, 3)).astype(np.float32)
LOADER = ft.ArrayLoader((X, X.sum(axis=1)), 2, shuffle=True, seed=1)  # 188 steps, the last smaller


def fit(*hooks, **arguments):
    arguments = {"epochs": 2, "fuse": 32, "verbose": 0, **arguments}
    return ft.fit(start(), STEP, LOADER, hooks=hooks, **arguments)


@pytest.mark.smoke
def test_steps_epochs_and_places_are_met_exactly_and_see_the_state_of_their_step() -> None:
    single = {}
    for event in ft.run(start(), STEP, LOADER, epochs=2, fuse=1):
        single[event.step] = digest(event.state)
    seen = {"hundreds": [], "sevens": [], "epochs": [], "places": []}

    def watch(name, trigger):
        @trigger
        def hook(event):
            assert digest(event.state) == single[event.step]
            seen[name].append(event.step)

        return hook

    fit(
        watch("hundreds", ft.every(steps=100)),
        watch("sevens", ft.every(steps=7)),
        watch("epochs", ft.every(epochs=1)),
        watch("places", ft.at(1, 33, 200)),
    )
    assert seen == {
        "hundreds": [100, 200, 300],
        "sevens": list(range(7, 377, 7)),
        "epochs": [188, 376],
        "places": [1, 33, 200],
    }


def test_a_due_point_adds_no_program_and_changes_no_result() -> None:
    traces = []

    def step(state, batch):
        traces.append(None)
        return STEP(state, batch)

    loader = ft.ArrayLoader((X[:374], X[:374, 0]), 2)
    digests = set()
    for due in (None, ft.every(steps=45), ft.at(7), ft.every(steps=100)):
        hooks = [] if due is None else [due(lambda e: None)]
        state, _ = ft.fit(start(), step, loader, hooks=hooks, fuse=32, verbose=0)
        digests.add(digest(state))
    assert len(traces) == 1
    assert len(digests) == 1


def test_timers_fire_at_the_end_of_a_chunk() -> None:
    calls = []
    fit(ft.every(seconds=1e-9)(lambda event: calls.append(event.step)))
    assert calls == [32, 64, 96, 128, 160, 187, 188, 220, 252, 284, 316, 348, 375, 376]
    calls.clear()
    fit(ft.every(seconds=1e9)(lambda event: calls.append(event.step)))
    assert not calls


def test_a_plain_function_sees_every_event() -> None:
    kinds = []
    fit(lambda event: kinds.append(type(event).__name__), epochs=1)
    assert kinds == ["ChunkEnd"] * (5 + 1 + 1) + ["EpochEnd", "RunEnd"]


def test_a_hook_can_stop_the_run() -> None:
    state, history = fit(ft.at(64)(lambda event: event.stop()))
    assert int(state.step) == len(history.steps["loss"]) == 64
    assert history.epochs == {}


@pytest.mark.parametrize(("steps", "epochs"), [(187, 0), (188, 1), (376, 2)])
def test_a_stop_after_the_last_step_of_an_epoch_still_ends_that_epoch(steps, epochs) -> None:
    _, history = fit(ft.at(steps)(lambda event: event.stop()), epochs=3)
    assert len(history.steps["loss"]) == steps
    assert len(history.epochs.get("loss", [])) == epochs


def test_values_that_hooks_add_are_in_the_history() -> None:
    @ft.every(epochs=1)
    def norm(event):
        event.values["norm"] = float(optax.tree.norm(event.state.params))

    _, history = fit(
        norm, ft.hooks.Evaluate(EVAL, LOADER, every=ft.every(steps=100), prefix="mid_")
    )
    assert history.epochs["norm"].shape == (2,)
    steps, values = history.within_epochs["mid_loss"]
    assert steps.tolist() == [100, 200, 300]
    assert np.all(np.isfinite(values))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: ft.every(steps=3, epochs=1), "expected one of steps, epochs, seconds and minutes"),
        (lambda: ft.every(seconds=-1), "a positive, finite number of seconds, got -1"),
        (lambda: ft.at(0), "one or more steps from 1 on"),
        (lambda: ft.hooks.Throughput(flops_per_step="3"), "flops_per_step: .* got '3'"),
        (lambda: ft.hooks.EarlyStopping(mode="least"), "mode: expected 'auto'"),
        (lambda: ft.hooks.EarlyStopping(patience=-1), "patience: .*0 or more, got -1"),
    ],
)
def test_settings_that_make_no_sense_are_refused(make, message) -> None:
    with pytest.raises(ValueError, match=message):
        make()


@pytest.mark.parametrize("value", [np.ones(3), "good", None], ids=str)
def test_values_that_are_no_numbers_are_refused_by_name(value) -> None:
    def add(event):
        event.values["word"] = value

    with pytest.raises(TypeError, match=r"event\.values\['word'\]: expected a number, got "):
        fit(add, epochs=1)


async def coroutine(event):
    raise AssertionError


def generator(event):
    yield event


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda path: 3, "got 3"),
        (lambda path: ft.hooks.CSVLogger, "got .*CSVLogger.* Pass an object and no class"),
        (ft.Checkpointer, "got Checkpointer.*a Checkpointer as checkpointer="),
        (keras.callbacks.CSVLogger, r"got .*CSVLogger.* callbacks of Keras to bridge\.fit"),
        (lambda path: coroutine, "without async and yield, got .*coroutine"),
        (lambda path: ft.every(steps=2)(generator), "without async and yield, got .*generator"),
        (lambda path: lambda: None, r"got <lambda>\(\)"),
        (lambda path: ft.every(steps=2)(lambda event, step: None), r"got <lambda>\(event, step\)"),
    ],
)
def test_what_is_no_hook_is_refused_by_place(tmp_path, make, words) -> None:
    with pytest.raises(TypeError, match=rf"hooks\[0\]: expected a function of one event.*{words}"):
        fit(make(tmp_path / "run"))
    hook = Recording()
    hook.every = 100
    with pytest.raises(TypeError, match=r"hooks\[0\]: expected `every` of Recording to be a"):
        fit(hook)
    with pytest.raises(TypeError, match=r"hooks: expected a sequence.*hooks=\[hook\]"):
        ft.fit((), lambda s, b: (s, {}), [np.ones(2)], hooks=print, verbose=0)


def test_hooks_can_be_used_in_another_run(tmp_path) -> None:
    stopping = ft.hooks.EarlyStopping("score", mode="min", restore_best=True)
    log = ft.hooks.CSVLogger(tmp_path / "log.csv")
    fit(Scripted(1.0, 2.0), stopping, log)
    second, history = fit(Scripted(9.0, 8.0), stopping, log)
    assert len(history.epochs["score"]) == 2
    assert stopping.best == 8.0
    assert int(second.step) == 376
    assert len((tmp_path / "log.csv").read_text().splitlines()) == 3


class Counter:
    def __init__(self, key=None):
        self.events = 0
        if key is not None:
            self.resume_key = key

    def __call__(self, event):
        self.events += isinstance(event, ft.events.EpochEnd)

    def state(self):
        return {"events": self.events}

    def restore(self, state):
        self.events = state["events"]


def test_hooks_resume_with_their_own_state_in_any_order(tmp_path) -> None:
    def made():
        values = Scripted(3.0, 2.0, 1.0)
        least = ft.hooks.EarlyStopping("score", mode="min", patience=9)
        most = ft.hooks.EarlyStopping("loss", mode="max", patience=9)
        return values, least, most, Counter("a"), Counter("b")

    values, least, most, a, b = made()
    b.events = 10
    fit(values, least, most, a, b, epochs=2, checkpointer=ft.Checkpointer(tmp_path))
    values, again, other, c, d = made()
    next(values.values), next(values.values)
    fit(values, other, d, c, again, epochs=3, checkpointer=ft.Checkpointer(tmp_path))
    assert (again.best, again.best_step) == (1.0, 564)
    assert (other.best, other.best_step) == (most.best, most.best_step)
    assert (c.events, d.events) == (3, 13)


def test_a_state_is_not_given_to_a_hook_that_watches_another_value(tmp_path) -> None:
    watching = ft.hooks.EarlyStopping("score", mode="min", patience=9)
    fit(Scripted(0.5), watching, epochs=1, checkpointer=ft.Checkpointer(tmp_path))
    other = ft.hooks.EarlyStopping("loss", patience=9)
    message = r"hooks: expected .*\['EarlyStopping\(score\)'\], got \['EarlyStopping\(loss\)'\]"
    with pytest.warns(UserWarning, match=message):
        _, history = fit(other, epochs=2, checkpointer=ft.Checkpointer(tmp_path))
    assert other.best == history.epochs["loss"][1]  # the first epoch was not seen


@pytest.mark.parametrize(
    ("make", "identity"),
    [
        (lambda: Counter(), "Counter"),
        (lambda: ft.hooks.EarlyStopping("loss"), r"EarlyStopping\(loss\)"),
        (lambda: ft.hooks.JSONLines("a/log.jsonl"), r"JSONLines\(log.jsonl\)"),
    ],
)
def test_hooks_whose_states_could_be_mixed_up_are_refused_before_a_step(
    make, identity, tmp_path
) -> None:
    steps = []
    hooks = [make(), make(), lambda event: steps.append(event.step)]
    with pytest.raises(ValueError, match=f"hooks: expected .* got {identity} twice.*resume_key = "):
        fit(*hooks, checkpointer=ft.Checkpointer(tmp_path))
    assert not steps
    hooks[0].resume_key = "first"
    assert len(HookRunner(hooks).resumable()) == 2


def test_only_the_first_process_saves_and_restores_a_logger(tmp_path, monkeypatch) -> None:
    path = tmp_path / "log.csv"

    def rows_after_a_restore(process: int) -> int:
        logger = ft.hooks.CSVLogger(path)
        logger(ft.events.EpochEnd(position=ft.Position(4, 0), state=(), values={"loss": 1.0}))
        saved = HookRunner([logger]).state()
        logger(ft.events.EpochEnd(position=ft.Position(8, 1), state=(), values={"loss": 1.0}))
        logger.close()
        with monkeypatch.context() as patch:
            patch.setattr(jax, "process_index", lambda: process)
            HookRunner([ft.hooks.CSVLogger(path)]).restore(saved)
        return len(path.read_text().splitlines()) - 1

    assert [rows_after_a_restore(process) for process in (1, 0)] == [2, 1]
    hooks = HookRunner([ft.hooks.TensorBoard(tmp_path), ft.hooks.EarlyStopping()])
    assert len(hooks.state()) == 2
    monkeypatch.setattr(jax, "process_index", lambda: 1)
    assert list(hooks.state()) == ["EarlyStopping(val_loss)"]


class Recording:
    """A hook with all methods, one of which takes the events.

    Args:
      failing: The method that raises an error, or the step at which the call does.
    """

    def __init__(self, failing=None):
        self.calls, self.failing = [], failing

    def note(self, call):
        self.calls.append(call)
        if call == self.failing:
            raise RuntimeError("on purpose")

    def __call__(self, event):
        self.note(event.step)

    def begin(self):
        self.note("begin")

    def logs(self, event):
        self.note(("logs", event.step))

    def close(self):
        self.note("close")


@pytest.mark.parametrize("failing", ["begin", 64, "close"])
def test_all_hooks_are_closed_when_one_fails_and_steps_before_an_error_are_logged(failing) -> None:
    hooks = [Recording(), Recording(failing), Recording()]
    with pytest.raises(RuntimeError, match="on purpose") as caught:
        fit(*hooks, epochs=1)
    assert [hook.calls.count("close") for hook in hooks] == [1, 1, 1]
    assert all(hook.calls[-1] == "close" for hook in hooks)
    assert hooks[0].calls[0] == "begin"
    if failing == 64:
        assert ("logs", 64) in hooks[0].calls
        assert len(caught.value.fit_result.history.steps["loss"]) == 64


@pytest.mark.parametrize("kind", ["function", "bound method"])
def test_a_schedule_does_not_change_the_function_that_it_calls(kind) -> None:
    recording = Recording()
    hook = recording.__call__ if kind == "bound method" else lambda event: recording(event)
    fit(ft.every(steps=100)(hook), ft.at(7)(hook), ft.every(epochs=1)(hook))
    assert recording.calls == [7, 100, 188, 200, 300, 376]
    assert not hasattr(hook, "every")
    fit(hook)  # without a schedule it gets every event
    assert len(recording.calls) > 12


def test_an_object_with_two_schedules_begins_and_ends_once() -> None:
    hook = Recording()
    fit(ft.at(3)(hook), ft.at(5)(hook), fuse=400, epochs=1)
    logs = [("logs", step) for step in (3, 5, 187, 188)]
    calls = [x for x in hook.calls if x not in logs]
    assert calls == ["begin", 3, 5, "close"]
    assert [x for x in hook.calls if x in logs] == logs


@pytest.mark.parametrize(
    "hook",
    [Recording, ft.ArrayLoader(X, 2), ft.every(steps=3)(print), ft.hooks.Evaluate(EVAL, LOADER)],
)
def test_a_schedule_of_what_is_no_hook_or_has_one_is_refused(hook) -> None:
    message = r"every\(steps=2\): expected a function of one event, without a schedule, got"
    with pytest.raises(TypeError, match=message):
        ft.every(steps=2)(hook)
