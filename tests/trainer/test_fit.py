import io
import signal
import time

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from rich.console import Console

import functrain as ft
from functrain.loop._events import LateLogs
from functrain.trainer._progress import ProgressReport
from functrain.trainer._recorder import Recorder

RNG = np.random.default_rng(0)
X = RNG.normal(size=(103, 4)).astype(np.float32)
Y = (X @ np.array([[1.0], [-2.0], [0.5], [3.0]], np.float32)).astype(np.float32)
MODEL = ft.Model(
    init=lambda key, x: ({"w": jnp.zeros((4, 1))}, {}),
    apply=lambda p, s, x, *, rng=None, training=False: ft.ModelOutput(x @ p["w"], s),
)
LOSS = ft.supervised(MODEL, optax.squared_error)


def setup(metrics=None):
    tx = optax.adam(1e-2)
    params, model_state = MODEL.init(jax.random.key(0), X)
    state = ft.TrainState.create(params=params, model_state=model_state, tx=tx)
    return state, ft.train_step(LOSS, tx, metrics=metrics)


@pytest.mark.smoke
def test_history_has_every_step_and_every_epoch() -> None:
    state, step = setup({"mae": ft.metrics.mean_absolute_error()})
    state, history = ft.fit(
        state,
        step,
        ft.ArrayLoader((X, Y), 10),
        epochs=3,
        eval_data=ft.ArrayLoader((X, Y), 50),
        eval_step=ft.eval_step(LOSS, metrics={"mse": ft.metrics.mean_squared_error()}),
        fuse=4,
        verbose=0,
    )
    assert int(state.step) == 33
    assert history.steps["loss"].shape == (33,)
    assert set(history.epochs) == {"loss", "mae", "val_loss", "val_mse", "seconds"}
    assert all(len(v) == 3 for v in history.epochs.values())
    weights = [10] * 10 + [3]
    expected = [np.average(history.steps["loss"][i : i + 11], weights=weights) for i in (0, 11, 22)]
    np.testing.assert_allclose(history.epochs["loss"], expected, rtol=1e-6)
    np.testing.assert_allclose(history.epochs["val_loss"], history.epochs["val_mse"], rtol=1e-6)


def test_logs_that_are_no_scalars_stay_out_of_the_history_for_hooks_to_read() -> None:
    means = []

    def read(event):
        if isinstance(event, ft.events.ChunkEnd):
            means.append(float(event.logs["image"].mean()))

    def step(state, batch):
        return state, {"loss": jnp.sum(batch[1]), "image": batch[0], "d": {"real": state}}

    loader = ft.ArrayLoader((X, Y), 10)
    _, history = ft.fit(jnp.zeros(()), step, loader, hooks=[read], verbose=0)
    assert set(history.steps) == {"loss", "d/real"}
    assert means


def test_an_array_of_the_state_that_a_hook_puts_into_the_values_is_kept_as_a_number() -> None:
    @ft.every(steps=4)
    def count(event):
        event.values["count"] = event.state.step

    _, history = ft.fit(*setup(), ft.ArrayLoader((X, Y), 10), hooks=[count], verbose=0)
    steps, counts = history.within_epochs["count"]
    assert steps.tolist() == counts.tolist() == [4, 8]
    assert counts.dtype == np.float64


@pytest.mark.parametrize("jit", [True, False])
def test_a_text_in_logs_is_refused_and_named(jit) -> None:
    def step(state, batch):
        return state, {"loss": jnp.sum(batch[1]), "d": {"note": "warmup"}}

    with pytest.raises(TypeError, match=r"logs: expected .* got the string 'warmup' at d/note"):
        ft.fit(jnp.zeros(()), step, ft.ArrayLoader((X, Y), 10), jit=jit, verbose=0)


def test_the_weighted_mean_of_an_epoch_does_not_depend_on_the_batch_size(capsys) -> None:
    weights = RNG.uniform(size=103).astype(np.float32)
    tx = optax.sgd(0.0)  # all batches see the same params
    state = ft.TrainState.create(params={"w": np.ones((4, 1), np.float32)}, tx=tx)
    loss_fn = ft.supervised(MODEL, optax.squared_error, reduction="weighted_mean")
    step, wide = ft.train_step(loss_fn, tx), X.astype(np.float64)
    errors = (wide.sum(1) - Y[:, 0]) ** 2
    expected = np.sum(errors * weights) / np.sum(weights, dtype=np.float64)
    for batch in (3, 8):
        data = ft.ArrayLoader((X, Y, weights), batch)
        _, history = ft.fit(state, step, data, verbose="lines")
        np.testing.assert_allclose(history.epochs["loss"], expected, rtol=1e-6)
    sums = [weights[i : i + 8].sum() for i in range(0, 103, 8)]
    np.testing.assert_allclose(history.steps["sum_of_weights"], sums, rtol=1e-6)
    assert "sum_of_weights" not in capsys.readouterr().out
    over_all, members = ft.population.step(step), ft.population.stack([state] * 2)
    members = members.replace(active=jnp.array([True, False]))
    _, history = ft.fit(members, over_all, data, verbose=0)
    np.testing.assert_allclose(history.epochs["loss"], [[expected, np.nan]], rtol=1e-6)


def test_fitting_twice_compiles_once() -> None:
    traces = []

    def step(state, batch):
        traces.append(None)
        return state, {"loss": jnp.sum(batch[1])}

    for _ in range(3):
        ft.fit(jnp.zeros(()), step, ft.ArrayLoader((X[:100], Y[:100]), 10), fuse=10, verbose=0)
    assert len(traces) == 1


@pytest.mark.parametrize("given", [{"eval_data": [1]}, {"eval_step": ft.eval_step(LOSS)}])
def test_evaluating_needs_both_data_and_step(given) -> None:
    state, step = setup()
    with pytest.raises(ValueError, match="eval_data and eval_step: expected both or neither"):
        ft.fit(state, step, ft.ArrayLoader((X, Y), 10), **given)


def output(verbose, terminal):
    stream = io.StringIO()
    console = Console(file=stream, force_terminal=terminal, width=160, color_system=None)
    state, step = setup({"mae": ft.metrics.mean_absolute_error()})
    recorder = Recorder()
    logs = LateLogs([recorder.logs])
    with ProgressReport(2, 11, verbose, console=console) as progress:
        loader = ft.ArrayLoader((X, Y), 10)
        for event in ft.run(state, step, loader, epochs=2, fuse=2):
            logs(event)
            recorder.before(event)
            if isinstance(event, ft.events.EpochEnd):
                event.values = {"loss": 0.5, "mae": 0.25}
            progress(event, recorder)
    return stream.getvalue()


def test_progress_is_a_line_an_epoch_where_there_is_no_terminal() -> None:
    lines = output("auto", terminal=False).splitlines()
    assert len(lines) == 2
    assert lines[0].startswith("epoch 1/2  11 steps")
    assert "examples/s" in lines[1]
    assert "loss 0.5  mae 0.25" in lines[1]


def test_the_rate_without_examples_is_that_of_steps(capsys) -> None:
    ft.fit(jnp.zeros(()), lambda s, _: (s + 1, {"loss": s}), ft.NoData(4), verbose=2)
    out = capsys.readouterr().out
    assert " steps/s" in out
    assert "examples" not in out


def test_progress_can_be_silenced_and_misspelt_settings_are_refused(capsys) -> None:
    ft.fit(jnp.zeros(()), lambda s, _: (s + 1, {"loss": s}), ft.NoData(4), verbose=0)
    assert capsys.readouterr().out == ""
    with pytest.raises(ValueError, match="verbose: expected 'auto'"):
        ft.fit(jnp.zeros(()), lambda s, _: (s + 1, {}), ft.NoData(4), verbose="loud")


def test_an_evaluation_iterator_must_last() -> None:
    state, step = setup()
    with pytest.raises(ValueError, match="eval_data: expected data that can be iterated 2"):
        ft.fit(
            state,
            step,
            ft.ArrayLoader((X, Y), 10),
            epochs=2,
            eval_data=iter([(X, Y)]),
            eval_step=ft.eval_step(LOSS),
        )


def test_what_fit_returns_is_nobody_elses() -> None:
    kept = jnp.ones(())

    def put(event):
        event.state = kept

    state, _ = ft.fit(
        jnp.zeros(()), lambda s, x: (s + x, {}), [jnp.ones(())], hooks=[put], verbose=0
    )
    ft.fuse(lambda s, x: (s + x, {}), 1)(state, jnp.ones(1))
    assert not kept.is_deleted()


def test_an_interrupt_keeps_what_a_hook_has_put_in_at_that_very_step(ctrl_c) -> None:
    def halve(event):
        if isinstance(event, ft.events.ChunkEnd):
            event.state = event.state / 2
            if event.step == 3:
                signal.raise_signal(signal.SIGINT)

    how = {"hooks": [halve], "fuse": 1, "verbose": 0}
    with pytest.raises(KeyboardInterrupt) as caught:
        ft.fit(jnp.zeros(()), lambda s, x: (s + x, {}), [jnp.ones(())] * 8, **how)
    assert float(caught.value.fit_result.state) == (0.5 + 1) / 4 + 0.5


@pytest.mark.parametrize("only_whole", [True, False])
@pytest.mark.parametrize("dtype", [jnp.int32, jnp.float16, jnp.bool_])
def test_logs_may_come_with_some_batches_only(only_whole, dtype) -> None:
    def step(state, batch):
        extra = {"extra": (state + 1).astype(dtype)} if (len(batch) == 10) == only_whole else {}
        return state + 1, {"l": state, **extra}

    loader = ft.ArrayLoader(X, 10)
    _, history = ft.fit(jnp.zeros(()), step, loader, epochs=2, verbose=0)
    has_value = np.tile(np.arange(len(loader)) < len(X) // 10, 2) == only_whole
    expected = np.where(has_value, np.arange(1, len(has_value) + 1).astype(dtype), np.nan)
    np.testing.assert_array_equal(history.steps["extra"], expected)
    means = np.nanmean(expected.reshape(2, -1), axis=1)
    np.testing.assert_allclose(history.epochs["extra"], means)


@pytest.mark.parametrize("fuse", [1, 4])
@pytest.mark.parametrize("logs", ["none", "an array", "a number"])
def test_a_fit_ends_when_its_programs_have_run(logs, fuse) -> None:
    ended = []

    def pause(x):
        time.sleep(0.02)
        return x

    def step(state, batch):
        state = jax.pure_callback(pause, jax.ShapeDtypeStruct((), jnp.float32), state) + 1
        return state, {"none": {}, "an array": {"x": state * jnp.ones(2)}, "a number": state}[logs]

    def end(event):
        if isinstance(event, ft.events.EpochEnd):
            ended.append(event.state.is_ready())

    how = {"epochs": 2, "fuse": fuse, "hooks": [end], "verbose": 0}
    state, history = ft.fit(jnp.zeros(()), step, ft.NoData(8), **how)
    assert state.is_ready()
    assert ended == [True, True]
    assert (history.epochs["seconds"] > 8 * 0.02).all()
