import chex
import jax
import jax.numpy as jnp
import keras
import numpy as np
import optax
import pytest

import functrain as ft

RNG = np.random.default_rng(0)
X = RNG.normal(size=(32, 4)).astype(np.float32)
Y = RNG.normal(size=(32, 1)).astype(np.float32)


def loss_fn(params, model_state, batch, *, rng, training):
    x, y = batch
    if rng is not None:
        x = x * jax.random.bernoulli(rng, 0.5, x.shape).astype(x.dtype)
    outputs = x @ params["w"]
    aux = ft.Aux({"calls": model_state["calls"] + 1.0}, outputs, {"scale": jnp.float32(2.0)})
    return jnp.mean((outputs - y) ** 2), aux


def make_state(tx, rng=None):
    return ft.TrainState.create(
        params={"w": np.ones((4, 1), np.float32)},
        model_state={"calls": np.float32(0)},
        tx=tx,
        rng=rng,
    )


def test_a_step_equals_jax_and_optax_by_hand() -> None:
    tx = optax.adam(1e-2)
    key = jax.random.key(7)
    state = make_state(tx, key)
    params, opt_state = state.params, state.opt_state
    step = ft.train_step(loss_fn, tx)
    for i in range(3):
        state, logs = step(state, (X, Y))
        (loss, _), grads = jax.value_and_grad(
            lambda p, i=i: loss_fn(
                p, {"calls": 0.0}, (X, Y), rng=jax.random.fold_in(key, i), training=True
            ),
            has_aux=True,
        )(params)
        updates, opt_state = tx.update(grads, opt_state, params)
        params = optax.apply_updates(params, updates)
        np.testing.assert_array_equal(logs["loss"], loss)
    np.testing.assert_array_equal(state.params["w"], params["w"])
    assert float(state.model_state["calls"]) == 3
    assert int(state.step) == 3


def by_sam(opaque):
    adversary = optax.chain(optax.contrib.normalize(), optax.sgd(0.05))
    return optax.contrib.sam(optax.sgd(0.1, momentum=0.9), adversary, 2, opaque_mode=opaque)


@pytest.mark.parametrize("opaque", [False, True])
def test_sharpness_aware_minimization_equals_that_of_optax_by_hand(opaque) -> None:
    key = jax.random.key(3)
    tx = by_sam(opaque)
    state = make_state(tx, key)
    params, opt_state = state.params, tx.init(state.params)

    def gradient(params, i):
        rng = jax.random.fold_in(key, i)
        return jax.grad(lambda p: loss_fn(p, {"calls": 0.0}, (X, Y), rng=rng, training=True)[0])(
            params
        )

    @jax.jit
    def by_hand(params, opt_state, i):
        updates, opt_state = tx.update(
            gradient(params, i), opt_state, params, grad_fn=lambda p, _: gradient(p, i)
        )
        return optax.apply_updates(params, updates), opt_state

    for i in range(4):
        params, opt_state = by_hand(params, opt_state, i)
    step = ft.train_step(loss_fn, tx)
    state, _ = ft.fit(state, step, [(X, Y)] * 4, fuse=4, verbose=0)
    np.testing.assert_allclose(state.params["w"], params["w"], rtol=1e-6)
    assert state.model_state["calls"] == 4


def test_an_update_that_is_refused_one_keyword_gets_the_others() -> None:
    plateau = optax.contrib.reduce_on_plateau(patience=1)
    both = optax.chain(by_sam(opaque=True), plateau)
    with pytest.raises(TypeError, match="missing 1 required keyword-only argument: 'value'"):
        ft.train_step(loss_fn, both)(make_state(both), (X, Y))

    def update(updates, state, params=None, *, value):
        return jax.tree.map(lambda g: g * value, updates), state

    named = optax.GradientTransformationExtraArgs(lambda params: (), update)
    state = make_state(named).apply_gradients({"w": jnp.ones((4, 1))}, named, value=2.0, other=1)
    np.testing.assert_array_equal(state.params["w"], 3.0)


def test_metrics_are_beside_the_state_and_do_not_touch_training() -> None:
    tx = optax.sgd(0.1)
    plain, metered = (
        ft.train_step(loss_fn, tx),
        ft.train_step(loss_fn, tx, metrics={"mae": ft.metrics.mean_absolute_error()}),
    )
    state, logs = plain(make_state(tx), (X, Y))
    carried, logs_too = metered(metered.start(make_state(tx)), (X, Y))
    chex.assert_trees_all_equal(state, carried.state)
    chex.assert_trees_all_equal(logs, logs_too)
    value = metered.metrics.compute(carried.metrics)["mae"]
    np.testing.assert_allclose(value, np.abs(X.sum(1, keepdims=True) - Y).mean(), rtol=1e-5)


def test_an_eval_step_changes_nothing_but_its_metrics() -> None:
    tx = optax.sgd(0.1)
    state = make_state(tx, jax.random.key(0))
    step = ft.eval_step(loss_fn, metrics={"mse": ft.metrics.mean_squared_error()})
    metered, _ = jax.jit(step)(step.start(state), (X, Y))
    assert metered.state.model_state["calls"] == 0
    values = step.metrics.compute(metered.metrics)
    expected = np.mean((X @ np.ones((4, 1)) - Y) ** 2)
    np.testing.assert_allclose([values["loss"], values["mse"]], [expected] * 2, rtol=1e-5)


def test_the_parts_of_a_loss_are_means_over_examples_in_evaluation() -> None:
    def vae(params, model_state, batch, *, rng, training):
        x, _ = batch
        rec, kl = jnp.mean(x @ params["w"]), jnp.mean(x**2)
        return rec + 0.5 * kl, ft.Aux(model_state, x @ params["w"], {"rec": rec, "kl": kl})

    tx = optax.sgd(0.0)
    step = ft.eval_step(vae, logs=("rec", "kl"), metrics={"mae": ft.metrics.mean_absolute_error()})
    state = ft.TrainState.create(params={"w": np.ones((4, 1), np.float32)}, tx=tx)
    data = ft.ArrayLoader((X, Y), 20)  # 20 and 12 examples
    values = ft.evaluate(state, step, data)
    rec, kl = X.sum(1).mean(), (X**2).mean()
    assert values["rec"] == pytest.approx(rec, rel=1e-4)
    assert values["kl"] == pytest.approx(kl, rel=1e-5)
    assert values["loss"] == pytest.approx(rec + 0.5 * kl, rel=1e-5)
    assert values["mae"] == pytest.approx(np.abs(X.sum(1, keepdims=True) - Y).mean(), rel=1e-5)
    _, history = ft.fit(
        state, ft.train_step(vae, tx), data, eval_data=data, eval_step=step, verbose=0
    )
    assert history.epochs["val_kl"][0] == history.epochs["kl"][0] == pytest.approx(values["kl"])


def test_names_of_logs_that_are_taken_or_missing_are_refused() -> None:
    mse = ft.metrics.mean_squared_error()
    for taken in ({"logs": ["loss"]}, {"metrics": {"loss": mse}}):
        with pytest.raises(ValueError, match=r"metrics and logs: .*a name of its own .*\['loss'\]"):
            ft.eval_step(loss_fn, **taken)
    step = ft.eval_step(loss_fn, logs=["kl"])
    with pytest.raises(ValueError, match=r"names among \['scale'\], got 'kl'"):
        step(step.start(make_state(optax.sgd(0.1))), (X, Y))


def test_two_updates_make_a_step_of_two_optimizers() -> None:
    tx_a, tx_b = optax.sgd(0.1), optax.adam(0.1)

    def pull(params, model_state, target, *, rng, training):
        return jnp.sum((params["w"] - target) ** 2), ft.Aux(model_state)

    def step(states, batch):
        a, loss_a, _ = ft.update(states["a"], pull, tx_a, states["b"].params["w"])
        b, loss_b, _ = ft.update(states["b"], pull, tx_b, a.params["w"] + batch)
        return {"a": a, "b": b}, {"a": loss_a, "b": loss_b}

    states = {"a": make_state(tx_a), "b": make_state(tx_b)}
    states, logs = ft.fuse(step, 3)(states, jnp.ones(3))
    assert logs["a"].shape == (3,)
    assert int(states["b"].step) == 3


@pytest.mark.parametrize(
    ("result", "message"),
    [
        (lambda x: (x, ft.Aux({})), r"expected a scalar loss, float32\[\], got float32\[4, 1\]"),
        (lambda x: (jnp.int32(1), ft.Aux({})), r"expected a scalar loss.*got int32\[\]"),
        (lambda x: x.sum(), r"expected \(loss, Aux\(.*got float32\[\]\. Write: return loss, funct"),
        (lambda x: (x.sum(), x), r"expected \(loss, Aux\(.*got 5 in 2 arrays\. Write"),
        (lambda x: None, r"expected \(loss, Aux\(\.\.\.\)\) from it, got None\. Write"),
    ],
)
def test_a_loss_function_that_returns_something_else_is_refused(result, message) -> None:
    def wrong(params, model_state, batch, *, rng, training):
        return result(params["w"])

    tx = optax.sgd(0.1)
    with pytest.raises(TypeError, match=message):
        jax.jit(ft.train_step(wrong, tx))(make_state(tx), (X, Y))


def test_a_step_with_metrics_takes_a_state_with_metrics() -> None:
    tx = optax.sgd(0.1)
    step = ft.train_step(loss_fn, tx, metrics={"mae": ft.metrics.mean_absolute_error()})
    with pytest.raises(TypeError, match=r"expected Metered.*step\.start\(state\)"):
        step(make_state(tx), (X, Y))
    with pytest.raises(TypeError, match=r"state: expected a TrainState, got Metered"):
        ft.train_step(loss_fn, tx)(step.start(make_state(tx)), (X, Y))


@pytest.mark.parametrize("tx", ["adam", keras.optimizers.Adam()])
def test_what_is_no_optax_transformation_is_refused(tx) -> None:
    message = r"tx: expected an optax transformation.*pass bridge\.optimizer\(tx\)"
    for make in (make_state, lambda tx: ft.train_step(loss_fn, tx)):
        with pytest.raises(TypeError, match=message):
            make(tx)
