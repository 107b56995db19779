"""Training without data: batches without arrays in every part of the library."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import functrain as ft

TX = optax.sgd(0.1)


def loss_fn(params, model_state, batch, *, rng, training):
    x = jax.random.normal(rng, (8,)) if training else jnp.ones(8)
    outputs = x * params["w"]
    return jnp.mean((outputs - 3 * x) ** 2), ft.Aux(model_state, outputs=outputs)


def create(key=None):
    key = jax.random.key(0) if key is None else key
    return ft.TrainState.create(params={"w": jnp.zeros(())}, tx=TX, rng=key)


STEP = ft.train_step(loss_fn, TX)
METRICS = {"largest": ft.metrics.mean(lambda outputs, y: outputs, where=lambda o, y: o > 0)}


def by_hand(steps):
    state, losses = create(), []
    for _ in range(steps):
        state, logs = jax.jit(STEP)(state, ())
        losses.append(logs["loss"])
    return state, np.array(losses)


@pytest.mark.parametrize("data", [ft.NoData(5), [()] * 5], ids=["NoData", "tuples"])
def test_a_fit_without_data_takes_the_steps_by_hand(data) -> None:
    state, history = ft.fit(create(), STEP, data, epochs=2, verbose=0)
    expected, losses = by_hand(10)
    np.testing.assert_array_equal(history.steps["loss"], losses)
    np.testing.assert_array_equal(state.params["w"], expected.params["w"])


def test_metrics_and_evaluations_need_no_data() -> None:
    step = ft.train_step(loss_fn, TX, metrics=METRICS)
    eval_step = ft.eval_step(loss_fn, metrics=METRICS)
    state, history = ft.fit(
        create(), step, ft.NoData(5), eval_data=ft.NoData(2), eval_step=eval_step, verbose=0
    )
    np.testing.assert_allclose(history.epochs["val_largest"], state.params["w"], rtol=1e-6)
    assert ft.evaluate(state, eval_step, ft.NoData(3))["largest"] == pytest.approx(
        float(state.params["w"])
    )
    assert np.isfinite(history.epochs["largest"]).all()
