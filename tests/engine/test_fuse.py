import gc
import os
import sys
import weakref

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import functrain as ft
from tests import fork_server


def counting():
    traces = []

    def step(state, batch):
        traces.append(None)
        return state + jnp.sum(batch), {"state": state}

    return step, traces


@pytest.mark.smoke
def test_k_steps_at_once_are_k_steps() -> None:
    step, _ = counting()
    chunk = np.arange(12, dtype=np.float32).reshape(4, 3)
    state, logs = ft.fuse(step, 4)(jnp.zeros(()), chunk)
    assert float(state) == chunk.sum()
    np.testing.assert_array_equal(logs["state"], [0, 3, 15, 36])


@pytest.mark.parametrize("unroll", [1, 2])
@pytest.mark.parametrize("nothing", [(), {}, None])
def test_batches_may_have_no_leaves(nothing, unroll) -> None:
    def step(state, batch):
        return state + 1, {"state": state}

    state, logs = ft.fuse(step, 5, unroll=unroll)(jnp.zeros(()), nothing)
    assert float(state) == 5
    np.testing.assert_array_equal(logs["state"], np.arange(5))
    state, logs = ft.fuse(step, 5, unroll=unroll)(state, nothing, steps=3)
    np.testing.assert_array_equal(logs["state"], [5, 6, 7, 0, 0])
    assert ft.inspect.memory(state, step, nothing).state == 4


def test_fusing_one_step_twice_compiles_once() -> None:
    step, traces = counting()
    for _ in range(3):
        ft.fuse(step, 4)(jnp.zeros(()), jnp.ones((4, 2)))
    assert len(traces) == 1


def test_a_step_that_is_gone_takes_its_programs_along() -> None:
    step, _ = counting()
    ft.fuse(step, 2)(jnp.zeros(()), jnp.ones((2, 2)))
    alive = weakref.ref(step)
    del step
    gc.collect()
    assert alive() is None


def test_the_state_is_consumed_unless_told_otherwise() -> None:
    step, _ = counting()
    state = jnp.zeros((16,))
    ft.fuse(step, 2, donate=False)(state, jnp.ones((2, 2)))
    assert not state.is_deleted()
    ft.fuse(step, 2)(state, jnp.ones((2, 2)))
    assert state.is_deleted()


@pytest.mark.parametrize(
    "chunk", [jnp.ones((3, 2)), {"a": jnp.ones((4, 2)), "b": jnp.ones(3)}, 1.0]
)
def test_a_chunk_of_another_length_is_refused_by_leaf(chunk) -> None:
    with pytest.raises(
        ValueError, match=r"chunk: expected 4 stacked batches, every leaf \[4, \.\.\.\]"
    ):
        ft.fuse(lambda state, batch: (state, {}), 4)(jnp.zeros(()), chunk)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda s: {**s, "w": s["w"].astype(jnp.bfloat16)},
            r"w: expected float32\[3\], got bfloat",
        ),
        (lambda s: {**s, "w": s["w"][None]}, r"w: expected float32\[3\], got float32\[1, 3\]"),
        (lambda s: {**s, "n": 1.0}, r"n: expected int32\[\], got float"),
        (lambda s: {**s, "extra": s["w"]}, r"extra: unexpected"),
        (lambda s: {"w": s["w"]}, r"n: missing"),
    ],
)
def test_a_step_that_changes_its_states_type_is_refused_by_leaf(change, message) -> None:
    state = {"w": jnp.zeros(3), "n": jnp.zeros((), jnp.int32)}
    with pytest.raises(TypeError, match=message):
        ft.fuse(lambda s, batch: (change(s), {}), 2)(state, jnp.ones(2))
    assert not state["w"].is_deleted()


@pytest.mark.parametrize("unroll", [1, 2])
@pytest.mark.parametrize(
    ("step", "got"), [(lambda s, b: s + b, r"float32\[\]"), (lambda s, b: (s, {}, b), "3 values")]
)
def test_a_step_that_returns_no_pair_is_refused(step, got, unroll) -> None:
    message = rf"step: expected it to return \(state, logs\), got .*({got})"
    with pytest.raises(TypeError, match=message):
        ft.fuse(step, 2, unroll=unroll)(jnp.zeros(()), jnp.ones(2))


def test_aliases_in_a_donated_state_are_named_and_nothing_is_lost() -> None:
    w = jnp.ones(8)
    state = {"student": {"w": w}, "teacher": {"w": w}}
    fused = ft.fuse(lambda s, batch: (jax.tree.map(lambda x: x + batch, s), {}), 2)
    with pytest.raises(ValueError, match="state/student/w and state/teacher/w"):
        fused(state, jnp.ones(2))
    assert not w.is_deleted()


@pytest.mark.parametrize(
    ("name", "arguments"), [("k", {"k": 0}), ("unroll", {"k": 1, "unroll": 0}), ("k", {"k": True})]
)
def test_fewer_than_one_step_is_refused(name, arguments) -> None:
    with pytest.raises(ValueError, match=f"{name}: expected an integer of at least 1"):
        ft.fuse(lambda s, b: (s, {}), **arguments)


def test_fewer_steps_use_the_first_batches_and_the_same_program() -> None:
    step, traces = counting()
    fused = ft.fuse(step, 4)
    chunk = np.arange(12, dtype=np.float32).reshape(4, 3)
    state, logs = fused(jnp.zeros(()), chunk, steps=2)
    assert float(state) == chunk[:2].sum()
    np.testing.assert_array_equal(logs["state"], [0, 3, 0, 0])
    fused(jnp.zeros(()), chunk)
    assert len(traces) == 1
    with pytest.raises(ValueError, match="steps: expected a whole number from 1 to 4, got 5"):
        fused(jnp.zeros(()), chunk, steps=5)


@pytest.mark.parametrize("steps", [1.5, True, 0])
def test_a_number_of_steps_that_is_none_is_refused(steps) -> None:
    fused = ft.fuse(lambda state, batch: (state + batch, {}), 2)
    with pytest.raises(ValueError, match="steps: expected a whole number from 1 to 2, got"):
        fused(jnp.zeros(()), jnp.ones(2), steps)


@pytest.mark.parametrize("unroll", [1, 2])
def test_the_program_takes_the_number_of_steps_it_is_given(unroll) -> None:
    program = ft.fuse(lambda state, batch: (state + batch, {}), 4, unroll=unroll)
    for run in (program, jax.jit(lambda *args: program(*args))):
        for steps in (1, np.int32(3), jnp.asarray(4)):
            assert float(run(jnp.zeros(()), jnp.ones(4), steps)[0]) == steps
    with pytest.raises(ValueError, match="steps: expected a whole number from 1 to 4, got 5"):
        program(jnp.zeros(()), jnp.ones(4), 5)


@pytest.mark.parametrize("rewrites", ["auto", "exact"])
@pytest.mark.parametrize("steps", [None, 2])
def test_a_fused_step_can_be_part_of_another_program(steps, rewrites) -> None:
    fused = ft.fuse(lambda state, batch: (state + batch, {}), 3, rewrites=rewrites)
    state, _ = jax.jit(lambda state, chunk: fused(state, chunk, steps))(jnp.zeros(()), jnp.ones(3))
    assert float(state) == (steps or 3)
    many, _ = jax.vmap(lambda state: fused(state, jnp.ones(3), steps))(jnp.arange(4.0))
    np.testing.assert_array_equal(many, np.arange(4) + (steps or 3))


def test_logs_of_plain_numbers_and_any_dtype_are_stacked() -> None:
    def step(state, batch):
        return state, {"one": 1, "half": 0.5, "flag": batch > 1, "byte": batch.astype(jnp.uint8)}

    _, logs = ft.fuse(step, 2)(jnp.zeros(()), jnp.array([1.0, 2.0]))
    assert {name: x.tolist() for name, x in logs.items()} == {
        "one": [1, 1],
        "half": [0.5, 0.5],
        "flag": [False, True],
        "byte": [1, 2],
    }


def test_a_consumed_state_is_refused_by_leaf() -> None:
    fused = ft.fuse(lambda s, batch: ({"w": s["w"] + batch}, {}), 2)
    state = {"w": jnp.zeros(8)}
    fused(state, jnp.ones(2))
    with pytest.raises(
        ValueError, match=r"(?s)state: expected live arrays.*  w: consumed.*Continue with"
    ):
        fused(state, jnp.ones(2))
    with pytest.raises(ValueError, match=r"expected a live array at w"):
        ft.run(state, lambda s, b: (s, {}), [np.zeros(2)])


def test_aliases_of_replicated_leaves_are_named() -> None:
    mesh = jax.make_mesh((2,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    replicated = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
    w = jax.device_put(jnp.ones(4), replicated)
    fused = ft.fuse(lambda s, batch: (s, {}), 2)
    with pytest.raises(ValueError, match="state/a and state/b"):
        fused({"a": w, "b": w}, jnp.ones(2))


COUNT_CALLS = """
import sys
import jax, jax.numpy as jnp
import functrain as ft
from functrain.engine import _fuse

_fuse._has_one_device = lambda: {has_one_device}


def step(state, batch):
    return [x + batch for x in state], {{"loss": batch}}


for leaves in (4, 400):
    fused, state, chunk, calls = ft.fuse(step, 2), [jnp.zeros(())] * leaves, jnp.ones(2), []
    state, _ = fused([x.copy() for x in state], chunk)
    state, _ = fused(state, chunk)
    sys.setprofile(lambda frame, event, arg: calls.append(event) if event == "call" else None)
    fused(state, chunk)
    sys.setprofile(None)
    print(len(calls))
"""


# Where there are several, the sharding of each leaf is read.
@pytest.mark.parametrize(("has_one_device", "calls_per_leaf"), [(True, 0), (False, 1)])
def test_a_call_runs_hardly_more_python_for_400_leaves(has_one_device, calls_per_leaf) -> None:
    environment = {name: value for name, value in os.environ.items() if name != "XLA_FLAGS"}
    done = fork_server.run(
        [sys.executable, "-c", COUNT_CALLS.format(has_one_device=has_one_device)],
        env=environment,
        capture_output=True,
        text=True,
        check=True,
    )
    few, many = map(int, done.stdout.split())
    assert few <= 16
    assert many == few + 396 * calls_per_leaf
