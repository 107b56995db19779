"""A population whose members follow schedules of different peaks."""

import jax
import jax.numpy as jnp
import numpy as np
import optax

import functrain as ft

X = np.random.default_rng(0).normal(size=(16, 3)).astype(np.float32)


def schedule(peak):
    return optax.warmup_cosine_decay_schedule(0.0, peak, 2, 8)


def loss_fn(params, model_state, x, *, rng, training):
    return jnp.mean((x @ params["w"] - 1) ** 2), ft.Aux(model_state)


def test_each_member_follows_its_own_peak() -> None:
    shape, peaks = schedule(1.0), [1e-3, 1e-2, 0.1]
    tx = optax.inject_hyperparams(lambda peak: optax.adam(lambda count: peak * shape(count)))(
        peak=1e-3
    )
    params = {"w": jnp.ones(3)}
    population = ft.population.create(
        lambda key: ft.TrainState.create(params=params, tx=tx),
        jax.random.key(0),
        hyperparameters={"peak": peaks},
    )
    data = ft.ArrayLoader(X, 2)
    step = ft.population.step(ft.train_step(loss_fn, tx))
    state = ft.fit(population, step, data, verbose=0).state
    for peak, member in zip(peaks, state, strict=True):
        alone = optax.adam(schedule(peak))
        by_hand, opt_state = params, alone.init(params)
        for i in range(8):
            grads = jax.grad(lambda p, x: loss_fn(p, (), x, rng=None, training=True)[0])(
                by_hand, X[2 * i : 2 * i + 2]
            )
            updates, opt_state = alone.update(grads, opt_state)
            by_hand = optax.apply_updates(by_hand, updates)
        np.testing.assert_allclose(member.params["w"], by_hand["w"], rtol=1e-5)
