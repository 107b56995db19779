import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import functrain as ft

from ..conftest import digest

RNG = np.random.default_rng(0)
X = RNG.normal(size=(12, 8, 6)).astype(np.float32)
Y = RNG.integers(0, 3, (12, 8)).astype(np.int32)
LOSS = optax.softmax_cross_entropy_with_integer_labels


class Net(nn.Module):
    @nn.compact
    def __call__(self, x, train):
        x = nn.BatchNorm(use_running_average=not train)(nn.Dense(8)(x))
        return nn.Dense(3)(nn.Dropout(0.2, deterministic=not train)(nn.relu(x)))


MODEL = ft.from_linen(Net())
LOSS_FN = ft.supervised(MODEL, LOSS)
# Much that remembers: moments, a schedule, accumulated gradients, an average.
TX = optax.MultiSteps(
    optax.chain(
        ft.tx.log_norm(), optax.adam(optax.linear_schedule(1e-2, 0.0, 100)), ft.tx.ema(0.9)
    ),
    2,
)


def begin(tx, rng=0):
    params, model_state = MODEL.init(jax.random.key(0), X[0])
    return ft.TrainState.create(
        params=params, model_state=model_state, tx=tx, rng=jax.random.key(rng)
    )


def of_one_key(params, model_state, batch, *, rng, training):
    """The loss in which nothing but the batches tells the steps apart."""
    return LOSS_FN(params, model_state, batch, rng=jax.random.key(9), training=training)


def parts(state):
    """What a skipped step must not touch."""
    return digest((state.params, state.model_state, state.opt_state.inner))


def spoiled(at, x=X):
    x = x.copy()
    x[at, 0, 0] = np.nan
    return x


def test_a_batch_with_nan_changes_no_bit_of_params_batch_statistics_and_optimizer() -> None:
    tx = ft.tx.skip_non_finite(TX)
    step = jax.jit(ft.train_step(LOSS_FN, tx))
    state = begin(tx)
    for i in range(3):
        state, _ = step(state, (X[i], Y[i]))
    before = parts(state)
    state, logs = step(state, (spoiled(3)[3], Y[3]))
    assert parts(state) == before
    assert np.isnan(logs["loss"])
    assert (int(logs["skipped"]), int(logs["skipped_in_a_row"]), int(state.step)) == (1, 1, 4)
    state, logs = step(state, (X[4], Y[4]))
    assert parts(state) != before
    assert (int(logs["skipped"]), int(logs["skipped_in_a_row"])) == (1, 0)


def test_a_negative_zero_stays_one() -> None:
    tx = ft.tx.skip_non_finite(optax.sgd(0.1))
    state = ft.TrainState.create(params={"w": jnp.array([-0.0, 0.0])}, tx=tx)
    state = jax.jit(lambda s, g: s.apply_gradients(g, tx))(state, {"w": jnp.array([1.0, jnp.inf])})
    assert np.signbit(state.params["w"]).tolist() == [True, False]


@pytest.mark.parametrize("guard", [ft.tx.skip_non_finite, ft.tx.loss_scale])
def test_a_gradient_that_overflows_within_the_optimizer_changes_nothing(guard) -> None:
    def loss_fn(params, model_state, batch, *, rng, training):
        # Finite up to 1, where the step begins, and without a bound above.
        return jnp.where(params["w"] > 1, jnp.inf, params["w"]) * params["w"], ft.Aux(model_state)

    sam = optax.contrib.sam(optax.adam(0.1), optax.sgd(0.1), opaque_mode=True)
    tx = guard(sam)
    state = ft.TrainState.create(params={"w": 1.0}, tx=tx)
    new, logs = jax.jit(ft.train_step(loss_fn, tx))(state, None)
    assert (float(new.params["w"]), int(logs["skipped"])) == (1.0, 1)
    assert all(jnp.isfinite(x).all() for x in jax.tree.leaves(new.opt_state))


def test_a_run_with_skipped_steps_is_the_run_without_their_batches() -> None:
    tx = ft.tx.skip_non_finite(TX)
    step = ft.train_step(of_one_key, tx)
    bad = [2, 3, 7]
    run, _ = ft.fuse(step, 12)(begin(tx), (spoiled(bad), Y))
    good = [i for i in range(12) if i not in bad]
    clean, _ = ft.fuse(step, len(good))(begin(tx), (X[good], Y[good]))
    assert parts(run) == parts(clean)
    assert ft.tx.logged(run)["skipped"] == 3


@pytest.mark.parametrize("guard", [ft.tx.skip_non_finite, ft.tx.loss_scale])
def test_metrics_and_means_are_those_of_a_run_without_the_skipped_batches(guard) -> None:
    tx = guard(optax.sgd(0.1))
    metrics = {"accuracy": ft.metrics.accuracy(), "mean": ft.metrics.mean_loss()}

    def fitted(x, y):
        batches = [(a, b) for a, b in zip(x, y, strict=True)]
        step = ft.train_step(of_one_key, tx, metrics=metrics)
        return ft.fit(begin(tx), step, batches, fuse=5, verbose=0).history

    bad = [2, 3, 7]
    good = [i for i in range(12) if i not in bad]
    run, clean = fitted(spoiled(bad), Y), fitted(X[good], Y[good])
    assert np.isnan(run.steps["loss"][bad]).all()
    for name in ("accuracy", "mean", "loss"):
        assert np.isfinite(run.epochs[name]).all()
        np.testing.assert_array_equal(run.epochs[name], clean.epochs[name])
    nothing = fitted(spoiled(range(12)), Y)
    assert np.isnan(nothing.epochs["loss"]).all()
    assert nothing.epochs["skipped"] == 12


def test_skipping_does_not_depend_on_k() -> None:
    tx = ft.tx.skip_non_finite(TX)
    step = ft.train_step(LOSS_FN, tx)
    data = ft.ArrayLoader((spoiled([2, 3, 7]).reshape(-1, 6), Y.reshape(-1)), 8)
    runs = [ft.fit(begin(tx), step, data, epochs=2, fuse=n, verbose=0) for n in (1, 5)]
    assert digest(runs[0].state) == digest(runs[1].state)
    in_a_row = runs[1].history.steps["skipped_in_a_row"][:12]
    assert in_a_row.tolist() == [0, 0, 1, 2, 0, 0, 0, 1, 0, 0, 0, 0]
    assert runs[1].history.epochs["skipped"].tolist() == [3, 6]


@pytest.mark.parametrize(
    "tx",
    [
        optax.chain(optax.clip(1.0), ft.tx.skip_non_finite(optax.sgd(0.1))),
        ft.tx.skip_non_finite(ft.tx.loss_scale(optax.sgd(0.1))),
        ft.tx.loss_scale(ft.tx.skip_non_finite(optax.sgd(0.1))),
    ],
)
def test_a_guard_around_a_part_of_the_optimizer_is_refused(tx) -> None:
    with pytest.raises(ValueError, match=r"around the whole optimizer, got one inside of another"):
        ft.train_step(LOSS_FN, tx)(begin(tx), (X[0], Y[0]))
