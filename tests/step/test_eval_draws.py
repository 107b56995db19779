"""Evaluation of a loss that draws: a key for each batch, the same in every evaluation."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import functrain as ft

X = np.arange(10, dtype=np.float32)
KEY = jax.random.key(7)
STATE = ft.TrainState.create(params={"w": jnp.ones(())}, tx=optax.sgd(0.0))


def noisy(params, model_state, batch, *, rng, training):
    drawn = batch * params["w"] + jax.random.normal(rng, batch.shape)
    return jnp.mean(drawn), ft.Aux(model_state, drawn)


def evaluated(batch_size=4, **how):
    step = ft.eval_step(noisy, rng=KEY, metrics={"again": ft.metrics.mean_loss()})
    return ft.evaluate(STATE, step, ft.ArrayLoader(X, batch_size), **how)


def by_hand(batch_size):
    batches = np.split(X, range(batch_size, len(X), batch_size))
    keys = [jax.random.fold_in(KEY, i) for i in range(len(batches))]
    drawn = [
        b + np.asarray(jax.random.normal(k, b.shape)) for b, k in zip(batches, keys, strict=True)
    ]
    return np.mean(np.concatenate(drawn).astype(np.float64))


@pytest.mark.parametrize("batch_size", [1, 4, 10])
def test_batch_number_i_draws_from_the_key_folded_with_i(batch_size) -> None:
    values = evaluated(batch_size)
    assert values["loss"] == pytest.approx(by_hand(batch_size), rel=1e-6)
    assert values.keys() == {"loss", "again"}  # the count of batches is no value


def test_the_number_of_batches_in_a_program_changes_no_bit() -> None:
    assert evaluated(fuse=1) == evaluated(fuse=3) == evaluated(fuse="auto")
    assert evaluated(jit=False)["loss"] == pytest.approx(evaluated()["loss"], rel=1e-6)


def test_every_evaluation_of_a_fit_draws_the_same() -> None:
    def loss(params, model_state, batch, *, rng, training):
        return jnp.mean(batch * params["w"]), ft.Aux(model_state)

    _, history = ft.fit(
        STATE,
        ft.train_step(loss, optax.sgd(0.0)),
        ft.ArrayLoader(X, 4),
        epochs=2,
        eval_data=ft.ArrayLoader(X, 4),
        eval_step=ft.eval_step(noisy, rng=KEY),
        verbose=0,
    )
    assert history.epochs["val_loss"].tolist() == [evaluated()["loss"]] * 2
