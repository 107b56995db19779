"""A state may be any pytree: a student and the target that follows it."""

import jax.numpy as jnp
import numpy as np
import optax
import pytest

import functrain as ft

TX = optax.sgd(0.1)
X = np.random.default_rng(1).normal(size=(40, 2)).astype(np.float32)
Y = X @ np.array([[1.0], [-2.0]], np.float32)


def fit_line(params, model_state, batch, *, rng, training):
    x, y = batch
    outputs = x @ params["w"]
    return jnp.mean((outputs - y) ** 2), ft.Aux(model_state, outputs)


def follow(states, batch):
    student, loss, _ = ft.update(states["student"], fit_line, TX, batch)
    target = optax.incremental_update(student.params, states["target"].params, 0.1)
    return {"student": student, "target": states["target"].replace(params=target)}, {"loss": loss}


def student_and_target():
    student = ft.TrainState.create(params={"w": jnp.zeros((2, 1))}, tx=TX)
    return {"student": student, "target": student}  # one set of arrays, twice


def test_a_target_follows_its_student() -> None:
    states, _ = ft.fit(student_and_target(), follow, ft.ArrayLoader((X, Y), 4), verbose=0)
    w, average = np.zeros((2, 1)), np.zeros((2, 1))
    for i in range(0, 40, 4):
        x, y = X[i : i + 4].astype(np.float64), Y[i : i + 4].astype(np.float64)
        w -= 0.1 * 2 * x.T @ (x @ w - y) / 4
        average += 0.1 * (w - average)
    np.testing.assert_allclose(states["student"].params["w"], w, rtol=1e-5)
    np.testing.assert_allclose(states["target"].params["w"], average, rtol=1e-5)


def test_a_network_among_several_is_evaluated_in_the_midst_of_a_fit() -> None:
    data = ft.ArrayLoader((X, Y), 4)
    step = ft.eval_step(fit_line, get_state=lambda states: states["target"])
    states, history = ft.fit(
        student_and_target(), follow, data, epochs=3, eval_data=data, eval_step=step, verbose=0
    )
    expected = np.mean((X @ np.asarray(states["target"].params["w"]) - Y) ** 2)
    assert history.epochs["val_loss"][-1] == pytest.approx(expected, rel=1e-5)
    assert history.epochs["val_loss"][0] > history.epochs["val_loss"][-1]
    alone = ft.evaluate(states["target"], ft.eval_step(fit_line), data)
    assert ft.evaluate(states, step, data) == alone
