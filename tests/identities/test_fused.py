"""Fused ≡ single ≡ plain jit ≡ the loop written by hand: the whole state, to the bit."""

import itertools

import jax
import jax.numpy as jnp
import keras
import numpy as np
import optax
import pytest

import bridge
import functrain as ft

from ..conftest import digest
from . import models

STEPS = 39  # a multiple of neither 2, 7 nor 32: every K has a tail
NORM = keras.layers.BatchNormalization
LOSS = optax.softmax_cross_entropy_with_integer_labels


def optimizer(clip=True):
    schedule = optax.warmup_cosine_decay_schedule(0.0, 1e-2, 5, STEPS)
    # A global norm sums over the leaves in the tree's order, which is not that of Keras's lists:
    # without it a state as lists of variables can be compared to the bit.
    norm = optax.clip_by_global_norm(1.0) if clip else optax.identity()
    return optax.chain(norm, optax.adamw(schedule))


def in_chunks(step, state, chunk, k, rewrites="auto"):
    """Takes all steps, K at a time, what is left over one by one; keeps every loss."""
    fused, single = (ft.fuse(step, n, rewrites=rewrites) for n in (k, 1))
    losses, at = [], 0
    while at < STEPS:
        program, n = (fused, k) if at + k <= STEPS else (single, 1)
        state, logs = program(state, jax.tree.map(lambda x, a=at, n=n: x[a : a + n], chunk))
        losses.append(np.asarray(logs["loss"]))
        at += n
    return digest((state, np.concatenate(losses)))


def one_by_one(step, state, chunk):
    step = jax.jit(step)
    losses = []
    for i in range(STEPS):
        state, logs = step(state, jax.tree.map(lambda x, i=i: x[i], chunk))
        losses.append(np.asarray(logs["loss"]))
    return digest((state, np.stack(losses)))


def by_hand(model, tx, state, chunk):
    """The loop as anyone would write it: stateless_call, value_and_grad, optax; nothing of ours.

    Takes the order of the variables from Keras, and hands the state back in ours for comparison.
    """

    @jax.jit
    def step(params, model_state, opt_state, x, y):
        def loss_fn(params):
            outputs, model_state_, losses = model.stateless_call(
                params, model_state, x, return_losses=True, training=True
            )
            value = jnp.mean(LOSS(outputs, y).astype(jnp.float32))
            for term in losses:
                value = value + term
            return value, model_state_

        (loss, model_state), grads = jax.value_and_grad(loss_fn, has_aux=True)(params)
        updates, opt_state = tx.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), model_state, opt_state, loss

    params = [v.value for v in model.trainable_variables]
    model_state = [v.value for v in model.non_trainable_variables]
    opt_state = tx.init(params)
    losses = []
    for x, y in zip(*chunk, strict=True):
        params, model_state, opt_state, loss = step(params, model_state, opt_state, x, y)
        losses.append(np.asarray(loss))
    return params, model_state, losses


def setup(kind, dtype, rng=None, clip=True):
    model = models.make(kind, dtype)
    tx = optimizer(clip)
    state = bridge.create_state(model, tx, rng=rng)
    step = ft.train_step(ft.supervised(bridge.from_keras(model), LOSS), tx)
    return model, tx, state, step, models.batches(model, STEPS)


# Each K is a program of its own to compile: all of them take long in sum.
KS = [(7,), pytest.param((1, 2, 32), marks=pytest.mark.long)]
EVERY_RUN = {("mlp", "float32"), ("mlp", "bfloat16"), ("lstm", "float32")}
DENSE = [
    pytest.param(*case, marks=[] if case in EVERY_RUN else [pytest.mark.long])
    for case in itertools.product(models.DENSE_KINDS, ("float32", "bfloat16"))
]


def copy(state):
    return jax.tree.map(jnp.copy, state)


@pytest.mark.parametrize("ks", KS)
@pytest.mark.parametrize(("kind", "dtype"), DENSE)
def test_fused_is_single_is_plain_jit(kind, dtype, ks) -> None:
    _, _, state, step, chunk = setup(kind, dtype)
    plain = one_by_one(step, state, chunk)
    assert {k: in_chunks(step, copy(state), chunk, k) for k in ks} == dict.fromkeys(ks, plain)


@pytest.mark.parametrize("ks", KS)
@pytest.mark.parametrize("dtype", ["float32", pytest.param("bfloat16", marks=pytest.mark.long)])
def test_fused_is_single_for_convolutions(dtype, ks) -> None:
    _, _, state, step, chunk = setup("convolutional", dtype)
    assert len({in_chunks(step, copy(state), chunk, k) for k in (1, *ks)}) == 1


@pytest.mark.smoke
@pytest.mark.long
def test_fused_with_exact_rewrites_is_plain_jit_for_convolutions() -> None:
    _, _, state, step, chunk = setup("convolutional", "float32")
    plain = one_by_one(step, state, chunk)
    assert in_chunks(step, copy(state), chunk, 7, rewrites="exact") == plain


@pytest.mark.parametrize("kind", ["dropout", pytest.param("attention", marks=pytest.mark.long)])
def test_fused_is_single_with_a_key(kind) -> None:
    _, _, state, step, chunk = setup(kind, "float32", rng=jax.random.key(5))
    plain = one_by_one(step, state, chunk)
    assert in_chunks(step, copy(state), chunk, 7) == plain


@pytest.mark.parametrize(("kind", "dtype"), DENSE)
def test_a_step_is_the_loop_written_by_hand(kind, dtype) -> None:
    model, tx, state, step, chunk = setup(kind, dtype, clip=False)
    params, model_state, losses = by_hand(model, tx, state, chunk)
    state, logs = ft.fuse(step, STEPS)(state, chunk)
    np.testing.assert_array_equal(logs["loss"], losses)
    bridge.to_keras(state, model)
    for got, expected in (
        (model.trainable_variables, params),
        (model.non_trainable_variables, model_state),
    ):
        for variable, value in zip(got, expected, strict=True):
            np.testing.assert_array_equal(np.asarray(variable.value), np.asarray(value))


@pytest.mark.smoke
def test_a_fit_does_not_depend_on_k() -> None:
    _, _, state, step, (x, y) = setup("batch_norm", "float32")
    loader = ft.ArrayLoader((x.reshape(-1, 12), y.reshape(-1)), 7, shuffle=True, seed=1)
    digests = {
        digest(ft.fit(state, step, loader, epochs=2, fuse=k, verbose=0).state) for k in (1, 7, 32)
    }
    assert len(digests) == 1


@pytest.mark.parametrize(
    ("widths", "size"),
    [
        ((1,), 2),
        *(
            pytest.param(*case, marks=pytest.mark.long)
            for case in [((1,), 16), ((3, 1), 2), ((3, 1), 16), ((5, 3), 2), ((5, 3), 16)]
        ),
    ],
)
def test_fused_is_single_for_the_smallest_models(widths, size) -> None:
    keras.utils.set_random_seed(0)
    hidden = [layer for n in widths for layer in (keras.layers.Dense(n, "relu"), NORM())]
    model = keras.Sequential([keras.Input((6,)), *hidden, keras.layers.Dense(models.CLASSES)])
    tx = optimizer()
    state = bridge.create_state(model, tx)
    step = ft.train_step(ft.supervised(bridge.from_keras(model), LOSS), tx)
    chunk = models.batches(model, STEPS, size)
    assert len({in_chunks(step, copy(state), chunk, k) for k in (1, 2, 7, 32)}) == 1


@pytest.mark.long
@pytest.mark.parametrize("name", ["MobileNetV2", "EfficientNetB0", "ResNet50", "ConvNeXtTiny"])
def test_fused_is_single_for_whole_architectures(name) -> None:
    keras.utils.set_random_seed(0)
    model = getattr(keras.applications, name)(
        weights=None, input_shape=(32, 32, 3), classes=10, classifier_activation=None
    )
    tx = optax.adam(1e-3)
    state = bridge.create_state(model, tx)
    step = ft.train_step(ft.supervised(bridge.from_keras(model), LOSS), tx)
    rng = np.random.default_rng(0)
    images = rng.normal(size=(3, 4, 32, 32, 3)).astype(np.float32)
    chunk = images, rng.integers(0, 10, (3, 4)).astype(np.int32)
    together, _ = ft.fuse(step, 3)(copy(state), chunk)
    for i in range(3):
        state, _ = ft.fuse(step, 1)(state, jax.tree.map(lambda x, i=i: x[i : i + 1], chunk))
    assert digest(together) == digest(state)
