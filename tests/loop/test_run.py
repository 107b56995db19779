import jax
import jax.numpy as jnp
import numpy as np
import pytest

import functrain as ft

X = np.arange(23, dtype=np.float32)


def counting():
    traces = []

    def step(state, batch):
        traces.append(jnp.shape(batch))
        return state + jnp.sum(batch), {"state": state}

    return step, traces


def test_one_program_takes_chunks_and_what_is_left_over_and_a_second_the_smaller_batch() -> None:
    step, traces = counting()
    for _ in ft.run(jnp.zeros(()), step, ft.ArrayLoader(X[:21], 3), epochs=3, fuse=3):
        pass
    assert traces == [(3,)]
    step, traces = counting()
    for _ in ft.run(jnp.zeros(()), step, ft.ArrayLoader(X, 3), epochs=3, fuse=3):
        pass
    assert traces == [(3,), (2,)]


def test_logs_are_those_of_the_steps_taken() -> None:
    step, _ = counting()
    events = ft.run(jnp.zeros(()), step, ft.ArrayLoader(X[:15], 3), fuse=4)
    chunks = [e for e in events if isinstance(e, ft.events.ChunkEnd)]
    assert [len(e.logs["state"]) for e in chunks] == [4, 1]
    assert [len(e.rows["state"]) for e in chunks] == [4, 4]
    assert chunks[1].latest() == {"state": float(X[:12].sum())}


def test_events_tell_where_the_run_is() -> None:
    step, _ = counting()
    events = list(ft.run(jnp.zeros(()), step, ft.ArrayLoader(X, 3), epochs=2, fuse=3))
    chunks = [
        (e.epoch, e.step, e.steps, e.examples) for e in events if isinstance(e, ft.events.ChunkEnd)
    ]
    assert chunks[:4] == [(0, 3, 3, 3), (0, 6, 3, 3), (0, 7, 1, 3), (0, 8, 1, 2)]
    assert [e.step for e in events if isinstance(e, ft.events.EpochEnd)] == [8, 16]


def test_a_state_of_numpy_and_python_numbers_is_a_state() -> None:
    def step(state, batch):
        return {"n": state["n"] + 1, "w": state["w"] + jnp.sum(batch)}, {}

    *_, end = ft.run({"n": 0, "w": np.float32(0)}, step, ft.ArrayLoader(X, 3), fuse=2)
    assert int(end.state["n"]) == 8


def test_metrics_start_afresh_each_epoch_and_events_carry_the_bare_state() -> None:
    step = ft.MeteredStep(
        lambda state, batch: (state + 1, jnp.mean(batch), ft.Aux()),
        ft.metrics.collection({"m": ft.metrics.mean_loss()}),
    )
    values = []
    for event in ft.run(jnp.int32(0), step, ft.ArrayLoader(X, 3), epochs=2, fuse=3):
        assert isinstance(event.state, jax.Array)
        if isinstance(event, ft.events.EpochEnd):
            values.append(float(event.metrics()["m"]))
    assert values == [X.mean(), X.mean()]
    assert int(event.state) == 16


def test_the_eager_way_runs_python_with_values_and_gives_the_same_result() -> None:
    seen = []

    def step(state, batch):
        seen.append(float(state))  # needs a value: fails under jit
        return state + jnp.sum(batch), {"state": state}

    events = list(ft.run(jnp.zeros(()), step, ft.ArrayLoader(X, 3), fuse=3, jit=False))
    assert len(seen) == 8
    assert float(events[-1].state) == X.sum()
    assert events[0].logs["state"].shape == (3,)


def test_an_iterator_lasts_one_epoch() -> None:
    step, _ = counting()
    batches = [X[:3], X[3:6]]
    *_, end = ft.run(jnp.zeros(()), step, iter(batches))
    assert float(end.state) == X[:6].sum()
    with pytest.raises(ValueError, match="iterated 2 times, got an iterator"):
        ft.run(jnp.zeros(()), step, iter(batches), epochs=2)


def test_errors_come_before_anything_runs() -> None:
    step, traces = counting()
    for arguments in ({"epochs": -1}, {"fuse": 0}):
        with pytest.raises(ValueError, match="expected"):
            ft.run(jnp.zeros(()), step, ft.ArrayLoader(X, 3), **arguments)
    with pytest.raises(TypeError, match="expected an array at f, got function"):
        ft.run({"f": step}, step, ft.ArrayLoader(X, 3))
    assert not traces


def test_a_changed_batch_in_mid_run_leaves_the_callers_state() -> None:
    step, _ = counting()
    state = jnp.zeros(())
    bad = [X[:3], X[3:6], X[6:9].astype(np.int32)]
    with pytest.raises(ValueError, match=r"(?s)step 2 of epoch 0.*got int32"):
        list(ft.run(state, step, bad, fuse=2))
    assert float(state) == 0


def test_data_that_refuse_to_say_how_long_they_are_are_data() -> None:
    class Endless:
        def __len__(self):
            raise NotImplementedError

        def __iter__(self):
            return iter([np.ones(2, np.float32)] * 3)

    step, _ = counting()
    assert [event.step for event in ft.run(jnp.zeros(()), step, Endless())][-1] == 3
