"""How the time of a run divides, by a clock that only the parts of the run move."""

import time

import jax.numpy as jnp
import numpy as np
import optax
import pytest

import functrain as ft
from functrain.engine import _times


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(_times, "_clock", clock)
    monkeypatch.setattr(time, "perf_counter", clock)
    return clock


def step(state, batch):
    return state + jnp.sum(batch), {}


def loss_fn(params, model_state, batch, *, rng, training):
    return jnp.mean(params["w"] * batch), ft.Aux(model_state)


def test_the_parts_are_those_of_the_clock(clock, tmp_path, capsys, monkeypatch) -> None:
    class Data:
        def __init__(self, batches: int, seconds: float) -> None:
            self.batches, self.seconds = batches, seconds

        def __iter__(self):
            for _ in range(self.batches):
                clock.now += self.seconds
                yield np.ones(3, np.float32)

    def work(event):
        event.state.step.block_until_ready()  # so that the next batch is made while nothing runs
        clock.now += 1

    def slow(*args, **how):
        clock.now += 5
        write(*args, **how)

    checkpointer = ft.Checkpointer(tmp_path / "run", every=2)
    write = checkpointer._write
    monkeypatch.setattr(checkpointer, "_write", slow)
    tx = optax.sgd(0.1)
    _, history = ft.fit(
        ft.TrainState.create(params={"w": jnp.ones(3)}, tx=tx),
        ft.train_step(loss_fn, tx),
        Data(4, 2.0),
        hooks=[work, ft.hooks.Goodput()],
        eval_data=Data(2, 3.0),  # the first batch is made before the run begins
        eval_step=ft.eval_step(loss_fn),
        checkpointer=checkpointer,
        fuse=1,
        verbose=0,
    )
    parts = {name.partition("/")[2]: x[-1] for name, x in history.epochs.items() if "/" in name}
    # Four batches, two saves, an evaluation, and the work after four steps and an epoch.
    expected = {"data": 8, "saving": 10, "evaluation": 3, "compiling": 0, "stopped": 0, "steps": 5}
    total = sum(expected.values())
    assert parts == pytest.approx({name: x / total for name, x in expected.items()})
    # The last checkpoint, and the work at the end of the run.
    line = f"goodput {100 * 6 / (total + 6):.1f}% of {total + 6:.1f} s: data "
    assert capsys.readouterr().out.splitlines()[-1].startswith(line)
    assert _times._asking == []


def test_a_run_that_resumes_counts_the_time_since_its_checkpoint(clock, tmp_path, capsys) -> None:
    days = [1000.0]

    def fit(epochs, hook):
        data = ft.ArrayLoader(np.ones((4, 3), np.float32), 1)
        checkpointer = ft.Checkpointer(tmp_path / "run")
        options = {"checkpointer": checkpointer, "hooks": [tick, hook], "verbose": 0}
        return ft.fit(jnp.zeros(()), step, data, epochs=epochs, **options)

    def tick(event):
        clock.now += 1

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(time, "time", lambda: days[0])
        fit(1, ft.hooks.Goodput())
        before = clock.now
        days[0] += 100
        _, history = fit(2, ft.hooks.Goodput())
    stopped = history.epochs["goodput/stopped"][-1]
    assert 0.8 < stopped < 100 / (100 + before)


def test_compiling_is_the_calls_that_compile(capsys) -> None:
    seen = []

    def look(event):
        seen.append(dict(hook._seconds))

    hook = ft.hooks.Goodput(every=1)
    data = ft.ArrayLoader(np.ones((12, 3), np.float32), 1)
    own = lambda state, batch: (state + jnp.max(batch), {})  # noqa: E731
    ft.fit(jnp.zeros(()), own, data, epochs=1, fuse=2, hooks=[look, hook], verbose=0)
    times = [x.get("compiling", 0) for x in seen]
    assert 0 < times[0] == times[4]


def test_the_error_of_another_hook_that_does_not_begin_is_the_one_that_is_raised() -> None:
    class Broken:
        def begin(self) -> None:
            raise OSError("no disk")

        def __call__(self, event) -> None:
            pass

    with pytest.raises(OSError, match="no disk"):
        ft.fit(0, step, [np.ones(3)], hooks=[Broken(), ft.hooks.Goodput()], verbose=0)
    assert _times._asking == []


def test_progress_lines_leave_the_parts_out(capsys) -> None:
    data = ft.ArrayLoader(np.ones((8, 3), np.float32), 4)
    _, history = ft.fit(0.0, step, data, hooks=[ft.hooks.Goodput()], verbose="lines")
    assert "goodput/steps" in history.epochs
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == ["epoch", "goodput"]
    assert "goodput/" not in lines[0]
