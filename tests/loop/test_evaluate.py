import jax.numpy as jnp
import numpy as np
import optax
import pytest

import functrain as ft

RNG = np.random.default_rng(0)
X = RNG.normal(size=(103, 4)).astype(np.float32)
Y = RNG.integers(0, 3, 103)
W = RNG.normal(size=(4, 3)).astype(np.float32)
MODEL = ft.Model(
    init=lambda key, x: ({"w": jnp.asarray(W)}, {}),
    apply=lambda p, s, x, *, rng=None, training=False: ft.ModelOutput(x @ p["w"], s),
)
LOSS = ft.supervised(MODEL, optax.softmax_cross_entropy_with_integer_labels)
STATE = ft.TrainState.create(params={"w": W}, tx=optax.sgd(0.1))


@pytest.mark.parametrize("fuse", [1, 4, "auto"])
@pytest.mark.parametrize("jit", [True, False])
def test_a_smaller_last_batch_counts_as_much_as_it_holds(fuse, jit) -> None:
    step = ft.eval_step(LOSS, metrics={"accuracy": ft.metrics.accuracy()})
    values = ft.evaluate(STATE, step, ft.ArrayLoader((X, Y), 10), fuse=fuse, jit=jit)
    logits = X.astype(np.float64) @ W
    expected = np.mean(np.log(np.exp(logits).sum(1)) - logits[np.arange(103), Y])
    assert values["loss"] == pytest.approx(expected, rel=1e-6)
    assert values["accuracy"] == pytest.approx(np.mean(logits.argmax(1) == Y), rel=1e-6)


def test_the_state_is_neither_changed_nor_consumed() -> None:
    ft.evaluate(STATE, ft.eval_step(LOSS), ft.ArrayLoader((X, Y), 10))
    np.testing.assert_array_equal(STATE.params["w"], W)


def test_evaluating_again_does_not_compile_again() -> None:
    traces = []

    def loss_fn(*args, **kwargs):
        traces.append(None)
        return LOSS(*args, **kwargs)

    step = ft.eval_step(loss_fn)
    for _ in range(3):
        ft.evaluate(STATE, step, ft.ArrayLoader((X[:100], Y[:100]), 10), fuse=10)
    assert len(traces) == 1


def test_a_step_without_metrics_is_refused() -> None:
    with pytest.raises(TypeError, match=r"from functrain\.eval_step"):
        ft.evaluate(STATE, ft.train_step(LOSS, optax.sgd(0.1)), ft.ArrayLoader((X, Y), 10))


def test_a_step_that_trains_is_refused() -> None:
    step = ft.train_step(LOSS, optax.sgd(0.1), metrics={"accuracy": ft.metrics.accuracy()})
    with pytest.raises(TypeError, match="got a step that trains"):
        ft.evaluate(STATE, step, ft.ArrayLoader((X, Y), 10))


def test_a_loader_that_drops_examples_is_refused_for_predictions() -> None:
    with pytest.raises(ValueError, match="an ArrayLoader that drops the remainder"):
        ft.predict(STATE, ft.predict_step(MODEL), ft.ArrayLoader(X, 10, drop_remainder=True))


@pytest.mark.parametrize("fuse", [1, 4, "auto"])
@pytest.mark.parametrize("jit", [True, False])
def test_predictions_come_in_the_order_of_the_data(fuse, jit) -> None:
    step = ft.predict_step(MODEL)
    outputs = ft.predict(STATE, step, ft.ArrayLoader(X, 10), fuse=fuse, jit=jit)
    assert isinstance(outputs, np.ndarray)
    np.testing.assert_allclose(outputs, X @ W, rtol=1e-5, atol=1e-6)


def test_a_step_that_has_predicted_is_not_traced_again() -> None:
    traces = []

    def step(state, x):
        traces.append(None)
        return state, x * state

    for state in (1.0, 2.0):
        ft.predict(state, step, ft.ArrayLoader(X, 10), fuse=4)
        ft.predict(state, step, ft.ArrayLoader(X, 10))
        if state == 1.0:
            before = len(traces)
    assert len(traces) == before


def test_predictions_keep_the_structure_of_the_outputs() -> None:
    def step(state, x):
        return state, {"a": x, "b": (x[:, 0], x[..., None])}

    outputs = ft.predict((), step, ft.ArrayLoader(X, 10))
    assert outputs["b"][1].shape == (103, 4, 1)


def test_a_loader_that_shuffles_is_refused() -> None:
    with pytest.raises(ValueError, match="got an ArrayLoader that shuffles"):
        ft.predict(STATE, ft.predict_step(MODEL), ft.ArrayLoader(X, 10, shuffle=True))


def test_outputs_that_are_not_per_example_are_refused() -> None:
    with pytest.raises(ValueError, match=r"outputs: expected one per example, \[B, \.\.\.\]"):
        ft.predict((), lambda s, x: (s, jnp.sum(x)), ft.ArrayLoader(X, 10))


def test_outputs_of_no_width_are_outputs() -> None:
    def step(state, x):
        return state, jnp.zeros((len(x), 0))

    assert ft.predict(0.0, step, ft.ArrayLoader(np.arange(5.0), 2)).shape == (5, 0)
