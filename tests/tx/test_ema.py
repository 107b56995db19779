import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import functrain as ft

from ..conftest import digest

RNG = np.random.default_rng(2)
X = RNG.normal(size=(40, 3)).astype(np.float32)
Y = (X @ np.array([[1.0], [-2.0], [0.5]])).astype(np.float32)
DATA = ft.ArrayLoader((X, Y), 4)
BEGIN = {"w": RNG.normal(size=(3, 1)).astype(np.float32)}


def loss_fn(params, model_state, batch, *, rng, training):
    x, y = batch
    return jnp.mean((x @ params["w"].astype(jnp.float32) - y) ** 2), ft.Aux(model_state)


def walked(tx, steps=10, params=BEGIN):
    """The state after some steps, and all params on the way."""
    state = ft.TrainState.create(params=params, tx=tx)
    step = jax.jit(ft.train_step(loss_fn, tx))
    seen = [np.asarray(state.params["w"], np.float64)]
    for batch in list(DATA.epoch(0))[:steps]:
        state, _ = step(state, batch)
        seen.append(np.asarray(state.params["w"], np.float64))
    return state, seen


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize("debias", [False, True])
def test_the_average_is_that_of_its_formula_in_float64(dtype, debias) -> None:
    params = {"w": jnp.asarray(BEGIN["w"], dtype)}
    tx = optax.chain(optax.sgd(0.05), ft.tx.ema(0.8, debias=debias))
    state, seen = walked(tx, params=params)
    average, weight = (0.0, 0.0) if debias else (seen[0], 1.0)
    for w in seen[1:]:
        average = 0.8 * average + 0.2 * w
        weight = 0.8 * weight + 0.2 if debias else 1.0
    kept = state.opt_state[1]
    assert kept.ema["w"].dtype == jnp.float32
    expected = average / weight
    ema = kept.ema["w"] / kept.weight
    np.testing.assert_allclose(ema, expected, rtol=2e-6)
    found = ft.tx.ema_params(state)["w"]
    assert found.dtype == dtype
    np.testing.assert_array_equal(found, ema.astype(dtype))


def test_the_average_starts_from_params_that_were_replaced_before_the_first_step() -> None:
    tx = optax.chain(optax.sgd(0.05), ft.tx.ema(0.9))
    begin = ft.TrainState.create(params=jax.tree.map(jnp.zeros_like, BEGIN), tx=tx)
    begin = begin.replace(params=jax.tree.map(jnp.asarray, BEGIN))
    np.testing.assert_array_equal(ft.tx.ema_params(begin)["w"], BEGIN["w"])
    step = jax.jit(ft.train_step(loss_fn, tx))
    state, _ = step(begin, DATA.batch(0, 0))
    from_create, _ = step(ft.TrainState.create(params=BEGIN, tx=tx), DATA.batch(0, 0))
    assert digest(ft.tx.ema_params(state)) == digest(ft.tx.ema_params(from_create))


def test_under_multi_steps_it_takes_a_step_with_each_update() -> None:
    inside = optax.MultiSteps(optax.chain(optax.sgd(0.1), ft.tx.ema(0.5)), 5)
    state, seen = walked(inside)
    expected = 0.25 * seen[0] + 0.25 * seen[5] + 0.5 * seen[10]
    np.testing.assert_allclose(ft.tx.ema_params(state)["w"], expected, rtol=1e-6)
    behind = optax.chain(optax.MultiSteps(optax.sgd(0.1), 5), ft.tx.ema(0.5))
    state, seen = walked(behind)
    average = seen[0]
    for w in seen[1:]:
        average = 0.5 * average + 0.5 * w
    np.testing.assert_allclose(ft.tx.ema_params(state)["w"], average, rtol=1e-6)


def test_a_fit_evaluates_with_the_average() -> None:
    tx = optax.chain(optax.sgd(0.1), ft.tx.ema(0.9))
    step = ft.train_step(loss_fn, tx)
    judged = ft.eval_step(loss_fn, get_state=ft.tx.averaged)
    state, history = ft.fit(
        ft.TrainState.create(params=BEGIN, tx=tx),
        step,
        DATA,
        eval_data=DATA,
        eval_step=judged,
        verbose=0,
    )
    w = np.asarray(ft.tx.ema_params(state)["w"], np.float64)
    assert history.epochs["val_loss"][-1] == pytest.approx(np.mean((X @ w - Y) ** 2), rel=1e-5)


def test_what_cannot_be_averaged_is_refused_in_words() -> None:
    with pytest.raises(ValueError, match=r"decay: expected a number from 0 up to 1.*got 1"):
        ft.tx.ema(1.0)
    tx = ft.tx.ema(0.9)
    with pytest.raises(ValueError, match="ema: expected params"):
        tx.update(BEGIN, tx.init(BEGIN))
    for tx in (
        optax.sgd(0.1),
        optax.chain(ft.tx.ema(0.9), ft.tx.ema(0.99)),
        optax.masked(ft.tx.ema(0.9), {"w": False}),
    ):
        state = ft.TrainState.create(params=BEGIN, tx=tx)
        with pytest.raises(ValueError, match=r"one average of all params.*functrain\.tx\.ema"):
            ft.tx.ema_params(state)
