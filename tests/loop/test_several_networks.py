"""A state may be any pytree: two networks that play, a student and the target that follows it."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import functrain as ft

BATCHES = np.random.default_rng(0).normal(2.0, 0.5, size=(12, 8, 1)).astype(np.float32)
DATA = ft.ArrayLoader(BATCHES.reshape(-1, 1), 8)
TXS = {"d": optax.adam(1e-2), "g": optax.sgd(1e-2, momentum=0.9)}


def dense(params, x):
    return jnp.tanh(x @ params["in"]) @ params["out"]


def weights(key, inputs):
    keys = jax.random.split(key)
    return {
        "in": jax.random.normal(keys[0], (inputs, 4)),
        "out": jax.random.normal(keys[1], (4, 1)),
    }


def players():
    keys = jax.random.split(jax.random.key(0))
    return {
        "d": ft.TrainState.create(params=weights(keys[0], 1), tx=TXS["d"]),
        "g": ft.TrainState.create(params=weights(keys[1], 2), tx=TXS["g"], rng=keys[0]),
    }


def judge(params, model_state, x, labels, *, rng, training):
    return optax.sigmoid_binary_cross_entropy(dense(params, x), labels).mean(), ft.Aux(model_state)


def deceive(params, model_state, d, size, *, rng, training):
    made = dense(params, jax.random.normal(rng, (size, 2)))
    loss, _ = judge(d.params, (), made, jnp.zeros((size, 1)), rng=None, training=training)
    return loss, ft.Aux(model_state, made)


def play(states, real):
    """A GAN's step; returns what `ft.update` does: states, a loss, and an Aux."""
    d, g = states["d"], states["g"]
    g, g_loss, aux = ft.update(g, lambda *a, **k: deceive(*a, d, len(real), **k), TXS["g"])
    both = jnp.concatenate([aux.outputs, real])
    labels = jnp.concatenate([jnp.ones_like(real), jnp.zeros_like(real)])
    d, d_loss, _ = ft.update(d, judge, TXS["d"], both, labels)
    return {"d": d, "g": g}, d_loss, ft.Aux(outputs=aux.outputs, logs={"of": {"g_loss": g_loss}})


def gan_step(states, real):
    states, loss, aux = play(states, real)
    return states, {"loss": loss, **aux.logs}


def same(a, b):
    for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
            x, y = jax.random.key_data(x), jax.random.key_data(y)
        np.testing.assert_array_equal(x, y)


def test_a_fit_of_two_networks_does_not_depend_on_k() -> None:
    results = [ft.fit(players(), gan_step, DATA, epochs=2, fuse=k, verbose=0) for k in (1, 5, 12)]
    for state, history in results[1:]:
        same(state, results[0].state)
        np.testing.assert_array_equal(history.steps["loss"], results[0].history.steps["loss"])
    assert int(results[0].state["d"].step) == 24


def test_a_step_over_several_networks_carries_metrics() -> None:
    bias = ft.metrics.mean(lambda outputs, real: outputs - real)
    made = ft.metrics.Metric(
        init=bias.init,
        update=lambda m, batch, aux, loss: bias.update(m, (None, batch), aux, loss),
        compute=bias.compute,
    )
    step = ft.MeteredStep(play, ft.metrics.collection({"bias": made}))
    states, history = ft.fit(players(), step, DATA, epochs=2, fuse=5, verbose=0)
    expected, biases = players(), []
    for _ in range(2):
        total = 0.0
        for batch in BATCHES:
            expected, _, aux = jax.jit(play)(expected, batch)
            total += float(jnp.mean(aux.outputs - batch))
        biases.append(total / len(BATCHES))
    np.testing.assert_allclose(history.epochs["bias"], biases, rtol=1e-5)
    for a, b in zip(jax.tree.leaves(states["d"].params), jax.tree.leaves(expected["d"].params),
                    strict=True):  # fmt: skip
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6)


# A student, and a target that follows it: an average of its weights, which no gradient touches.

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
