"""All combinators in one step: a GAN in bfloat16, cut up, guarded, averaged, partly frozen."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import functrain as ft

from ..conftest import digest

STEPS, SIZE = 8, 6
REAL = np.random.default_rng(0).normal(2.0, 0.5, size=(STEPS, SIZE, 2)).astype(np.float32)
BAD = 3  # the batch that holds a NaN


class Net(nn.Module):
    out: int

    @nn.compact
    def __call__(self, x, train):
        x = nn.Dense(8, name="embed")(x)
        x = nn.BatchNorm(use_running_average=not train, momentum=0.9)(x)
        x = nn.Dropout(0.1, deterministic=not train)(nn.tanh(x))
        return nn.Dense(self.out)(x)


def made(out):
    model = ft.remat(ft.cast(ft.from_linen(Net(out))), jax.checkpoint_policies.dots_saveable)
    return ft.freeze(model, "embed/**")


MODELS = {"d": made(1), "g": made(2)}
TX = ft.tx.skip_non_finite(
    optax.chain(
        ft.tx.log_norm(),
        optax.clip_by_global_norm(1.0),
        ft.tx.param_groups({"**/bias": optax.sgd(1e-2), "**": optax.adam(1e-2)}),
        ft.tx.ema(0.9),
    )
)


def begin():
    def one(i, model):
        params, model_state = model.init(jax.random.key(i), REAL[0])
        rng = jax.random.key(10 + i)
        return ft.TrainState.create(params=params, model_state=model_state, tx=TX, rng=rng)

    return {name: one(i, model) for i, (name, model) in enumerate(MODELS.items())}


judge = ft.supervised(MODELS["d"], optax.sigmoid_binary_cross_entropy)


def step(states, real):
    d, g = states["d"], states["g"]

    def deceive(params, model_state, noise, *, rng, training):
        made = MODELS["g"].apply(params, model_state, noise, rng=rng, training=training)
        loss, _ = judge(
            d.params, d.model_state, (made.outputs, jnp.ones((len(noise), 1))),
            rng=None, training=False,
        )  # fmt: skip
        return loss, ft.Aux(made.model_state, made.outputs)

    noise = jax.random.normal(jax.random.fold_in(g.rng, g.step), real.shape)
    g, g_loss, aux = ft.update(g, ft.micro_batches(deceive, 4), TX, noise)  # 4 and 2 examples
    both = jnp.concatenate([aux.outputs, real])
    labels = jnp.repeat(jnp.array([[0.0], [1.0]]), len(real), axis=0)
    d, d_loss, _ = ft.update(d, ft.micro_batches(judge, 4), TX, (both, labels))
    logs = {"loss": d_loss, "g_loss": g_loss, "d": ft.tx.logged(d), "g": ft.tx.logged(g)}
    return {"d": d, "g": g}, logs


@pytest.fixture(scope="module")
def runs():
    real = REAL.copy()
    real[BAD, 0, 0] = np.nan
    data = ft.ArrayLoader(real.reshape(-1, 2), SIZE)
    return {k: ft.fit(begin(), step, data, fuse=k, verbose=0) for k in (1, 3)}


@pytest.mark.long
def test_all_together_does_not_depend_on_k(runs) -> None:
    assert len({digest((run.state, run.history.steps)) for run in runs.values()}) == 1


def test_the_network_that_met_the_nan_skipped_it(runs) -> None:
    steps = runs[3].history.steps
    assert steps["d/skipped_in_a_row"].tolist() == [int(i == BAD) for i in range(STEPS)]
    assert steps["g/skipped"].tolist() == [0] * STEPS
    assert np.isfinite(steps["d/gradient_norm"]).all()
    assert np.isnan(steps["loss"]).tolist() == [i == BAD for i in range(STEPS)]


def test_all_together_trains_what_is_not_frozen(runs) -> None:
    first, last = begin(), runs[3].state
    for name in ("d", "g"):
        assert digest(last[name].model_state.frozen) == digest(first[name].model_state.frozen)
        assert digest(last[name].params) != digest(first[name].params)
        for a, b in zip(
            jax.tree.leaves(ft.tx.ema_params(last[name])), jax.tree.leaves(last[name].params),
            strict=True,
        ):  # fmt: skip
            assert a.dtype == b.dtype == jnp.float32
            assert np.isfinite(a).all()
            assert not np.array_equal(a, b)
