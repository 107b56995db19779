"""Spikes of the loss or of the gradient are skipped, as a reference in float64 says."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import functrain as ft

from ..conftest import digest

WINDOW, FACTOR = 16, 6.0


def by_numpy(losses, norms):
    """Whether each step is taken, by the definition in float64."""
    taken, windows = [], ([], [])
    for new in zip(losses, norms, strict=True):
        limits = [
            np.mean(x) + FACTOR * np.std(x) if len(x) >= WINDOW // 2 else np.inf for x in windows
        ]
        taken.append(all(x <= limit for x, limit in zip(new, limits, strict=True)))
        for window, x, limit in zip(windows, new, limits, strict=True):
            window.append(min(x, limit))
            del window[:-WINDOW]
    return taken


def test_the_steps_taken_are_those_of_the_definition() -> None:
    rng = np.random.default_rng(0)
    losses = 1 + 0.1 * rng.standard_normal(90)
    norms = 1 + 0.1 * rng.standard_normal(90)
    losses[[3, 30, 31, 70]] += 5
    norms[[40, 71]] *= 4
    norms[80:] += 20  # stays there
    tx = ft.tx.skip_spikes(optax.sgd(1.0), window=WINDOW, factor=FACTOR)
    params = jnp.zeros(1)
    state, taken = tx.init(params), []
    for loss, norm in zip(losses, norms, strict=True):
        updates, state = tx.update(jnp.full(1, norm), state, params, value=jnp.float32(loss))
        taken.append(bool(state.taken))
        assert (float(updates[0]) != 0) == taken[-1]
    assert taken == by_numpy(losses, norms)
    skipped = [i for i, x in enumerate(taken) if not x]
    assert skipped[:5] == [30, 31, 40, 70, 71]
    # The norms that stay at another level are taken again after some steps.
    assert 80 <= skipped[5] < skipped[-1] < 89
    assert int(state.logs.measurement["skipped"]) == len(skipped)


class Block(nn.Module):
    """A causal transformer of one block."""

    @nn.compact
    def __call__(self, tokens):
        x = nn.Embed(16, 32)(tokens) + nn.Embed(12, 32)(jnp.arange(12))
        mask = nn.make_causal_mask(tokens)
        x += nn.MultiHeadDotProductAttention(2)(nn.LayerNorm()(x), mask=mask)
        return nn.Dense(16)(nn.LayerNorm()(x + nn.Dense(32)(nn.gelu(nn.Dense(64)(x)))))


STEPS, BAD = 96, [50, 51, 75]


def data(*, is_planted=True):
    """Sequences that count up. Bad batches have the labels of other tokens, with large weights."""
    begin = np.random.default_rng(0).integers(16, size=(STEPS * 8, 1))
    tokens = ((begin + np.arange(13)) % 16).astype(np.int32)
    weight = np.ones((STEPS, 8), np.float32)
    labels = tokens[:, 1:].reshape(STEPS, 8, 12).copy()
    if is_planted:
        labels[BAD] = (labels[BAD] + 7) % 16
        weight[BAD] = 100
    return tokens[:, :-1], labels.reshape(-1, 12), weight.reshape(-1)


def train(tx, fuse, batches):
    model = ft.from_linen(Block())

    def loss_fn(params, model_state, batch, *, rng, training):
        tokens, labels, weight = batch
        logits = model.apply(params, {}, tokens).outputs
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, labels)
        return jnp.mean(losses * weight[:, None]), ft.Aux(model_state)

    params, _ = model.init(jax.random.key(0), batches[0][:1])
    state = ft.TrainState.create(params=params, tx=tx)
    loader = ft.ArrayLoader(batches, 8)
    return ft.fit(state, ft.train_step(loss_fn, tx), loader, epochs=1, fuse=fuse, verbose=0)


@pytest.mark.parametrize("fuse", [1, 7, 32])
def test_a_transformer_goes_on_as_if_bad_batches_were_not_there(fuse) -> None:
    tx = ft.tx.skip_spikes(optax.adam(1e-2), window=32)
    state, history = train(tx, fuse, data())
    assert list(np.flatnonzero(np.diff(history.steps["skipped"]) > 0) + 1) == BAD
    assert history.steps["loss"][-1] < 0.1
    single, _ = train(tx, 1, data())
    assert digest(state) == digest(single)


def test_without_it_the_same_batches_undo_the_training() -> None:
    _, history = train(optax.adam(1e-2), 8, data())
    _, unspoiled = train(optax.adam(1e-2), 8, data(is_planted=False))
    good = list(range(52, 75))
    assert history.steps["loss"][good].mean() > 3 * unspoiled.steps["loss"][good].mean()


def test_a_run_without_spikes_has_the_bits_of_one_without_the_guard() -> None:
    batches = data(is_planted=False)
    guarded, _ = train(ft.tx.skip_spikes(optax.adam(1e-2)), 8, batches)
    plain, _ = train(optax.adam(1e-2), 8, batches)
    assert digest(guarded.params) == digest(plain.params)


@pytest.mark.parametrize("how", [{"window": 1}, {"window": 2.5}, {"factor": 0}, {"factor": "6"}])
def test_numbers_out_of_range_are_refused(how) -> None:
    with pytest.raises(ValueError, match=next(iter(how))):
        ft.tx.skip_spikes(optax.sgd(0.1), **how)


def test_two_guards_around_each_other_are_refused() -> None:
    tx = ft.tx.loss_scale(ft.tx.skip_spikes(optax.sgd(0.1)))
    params = {"w": jnp.ones(1)}
    step = ft.train_step(lambda p, *_, **__: (jnp.sum(p["w"]), {}), tx)
    state = ft.TrainState.create(params=params, tx=tx)
    with pytest.raises(ValueError, match="one of skip_non_finite, skip_spikes and loss_scale"):
        step(state, None)
