import flax.training.dynamic_scale
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import functrain as ft

from ..conftest import digest

RNG = np.random.default_rng(1)
# Some batches overflow float16 at some scales, some at every scale.
SIZES = np.array([1, 1, 300, 1, 1, 1, 1, np.inf, 1, 1e3, 1, 1, 1, 1, 1, 1], np.float32)
X = (RNG.normal(size=(16, 8, 4)) * SIZES[:, None, None]).astype(np.float32)
Y = RNG.normal(size=(16, 8, 1)).astype(np.float32)
PARAMS = {"w": RNG.normal(size=(4, 1)).astype(np.float32)}


def loss_fn(params, model_state, batch, *, rng, training):
    x, y = (a.astype(jnp.float16) for a in batch)
    outputs = x @ params["w"].astype(jnp.float16)
    return jnp.mean((outputs - y).astype(jnp.float32) ** 2), ft.Aux(model_state)


def test_losses_params_and_scales_are_those_of_flax() -> None:
    inner = optax.adam(1e-2)
    tx = ft.tx.loss_scale(inner, initial_scale=1024.0, growth_interval=3)
    step = jax.jit(ft.train_step(loss_fn, tx))
    state = ft.TrainState.create(params=PARAMS, tx=tx)

    # flax counts from 0, and so grows one update later.
    theirs = flax.training.dynamic_scale.DynamicScale(
        growth_interval=2, scale=jnp.float32(1024.0), minimum_scale=1.0
    )
    params, opt_state = PARAMS, inner.init(PARAMS)

    @jax.jit
    def by_flax(theirs, params, opt_state, batch):
        take = theirs.value_and_grad(
            lambda params: loss_fn(params, (), batch, rng=None, training=True)[0]
        )
        new_scale, finite, loss, grads = take(params)
        updates, moved = inner.update(grads, opt_state, params)
        new = optax.apply_updates(params, updates), moved
        kept = jax.tree.map(lambda a, b: jnp.where(finite, a, b), new, (params, opt_state))
        return new_scale, *kept, loss

    scales, skipped = [], []
    for batch in zip(X, Y, strict=True):
        scale = float(theirs.scale)
        theirs, params, opt_state, loss = by_flax(theirs, params, opt_state, batch)
        state, logs = step(state, batch)
        assert float(logs["loss_scale"]) == scale
        np.testing.assert_array_equal(logs["loss"], loss)
        np.testing.assert_allclose(state.params["w"], params["w"], rtol=1e-5)
        scales.append(scale)
        skipped.append(int(logs["skipped"]))
    assert set(np.sign(np.diff(scales))) == {-1, 0, 1}  # it went down and up
    assert 2 <= skipped[-1] < len(X)


@pytest.mark.parametrize("split", [lambda f: f, lambda f: ft.micro_batches(f, 2)])
def test_small_gradients_survive_float16(split) -> None:
    def tiny(params, model_state, x, *, rng, training):
        half = params["w"].astype(jnp.float16) * jnp.float16(2.0**-10)
        return jnp.mean((half * x).astype(jnp.float32)) + 1, ft.Aux(model_state)

    x = jnp.full(4, 2.0**-15, jnp.float16)
    moved = {}
    for name, tx in {"plain": optax.sgd(1.0), "scaled": ft.tx.loss_scale(optax.sgd(1.0))}.items():
        state = ft.TrainState.create(params={"w": jnp.zeros(())}, tx=tx)
        new, loss, _ = ft.update(state, split(tiny), tx, x)
        moved[name] = float(new.params["w"])
        assert loss == 1.0
    assert moved == {"plain": 0.0, "scaled": -(2.0**-25)}


def test_what_the_optimizer_sees_is_not_scaled() -> None:
    tx = ft.tx.loss_scale(optax.chain(ft.tx.log_norm(), optax.sgd(0.1)), initial_scale=64.0)
    plain = optax.chain(ft.tx.log_norm(), optax.sgd(0.1))
    logs = [
        ft.train_step(loss_fn, t)(ft.TrainState.create(params=PARAMS, tx=t), (X[0], Y[0]))[1]
        for t in (tx, plain)
    ]
    np.testing.assert_allclose(logs[0]["gradient_norm"], logs[1]["gradient_norm"], rtol=1e-2)
    np.testing.assert_array_equal(logs[0]["loss"], logs[1]["loss"])


def test_the_scale_does_not_depend_on_k_and_has_an_end() -> None:
    tx = ft.tx.loss_scale(optax.sgd(1e-3), initial_scale=4.0, growth_interval=2)
    step = ft.train_step(loss_fn, tx)
    begin = ft.TrainState.create(params=PARAMS, tx=tx)
    data = ft.ArrayLoader((X.reshape(-1, 4), Y.reshape(-1, 1)), 8)
    states = [ft.fit(begin, step, data, fuse=k, verbose=0).state for k in (1, 7)]
    assert digest(states[0]) == digest(states[1])
    for _ in range(3):
        begin = begin.apply_gradients({"w": jnp.full((4, 1), jnp.nan)}, tx)
    assert begin.opt_state.scale == 1.0


def test_params_in_float16_whose_gradients_would_be_zero_are_refused() -> None:
    params = {"w": jnp.ones(2, jnp.float16), "b": jnp.zeros(())}
    with pytest.raises(ValueError, match=r"no float16 .*got\n  w: float16\[2\]\n.*functrain\.cast"):
        ft.TrainState.create(params=params, tx=ft.tx.loss_scale(optax.sgd(0.1)))


@pytest.mark.parametrize(
    "given", [{"initial_scale": 0.5}, {"initial_scale": np.inf}, {"growth_interval": 0}]
)
def test_numbers_that_make_no_sense_are_refused(given) -> None:
    with pytest.raises(ValueError, match=f"{next(iter(given))}: expected"):
        ft.tx.loss_scale(optax.sgd(0.1), **given)
