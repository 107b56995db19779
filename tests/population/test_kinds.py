"""Populations of what functrain trains: linen and nnx modules, Keras models, a GAN."""

import equinox as eqx
import flax.linen as nn
import jax
import jax.numpy as jnp
import keras
import numpy as np
import optax
import pytest
from flax import nnx

import bridge
import functrain as ft

from .setting import X, Y, assert_close, loader

P = ft.population
KEY = jax.random.key(3)
LOSS = optax.softmax_cross_entropy_with_integer_labels
TX = optax.sgd(0.1, momentum=0.9)


class Linen(nn.Module):
    @nn.compact
    def __call__(self, x, training):
        x = nn.BatchNorm(use_running_average=not training)(nn.Dense(6)(x))
        return nn.Dense(2)(nn.Dropout(0.2, deterministic=not training)(nn.relu(x)))


class Nnx(nnx.Module):
    def __init__(self, rngs):
        self.first = nnx.Linear(8, 6, rngs=rngs)
        self.norm = nnx.BatchNorm(6, rngs=rngs)
        self.drop = nnx.Dropout(0.2, rngs=rngs)
        self.last = nnx.Linear(6, 2, rngs=rngs)

    def __call__(self, x):
        return self.last(self.drop(nnx.relu(self.norm(self.first(x)))))


def keras_model():
    return keras.Sequential(
        [
            keras.Input((8,)),
            keras.layers.Dense(6, "relu"),
            keras.layers.BatchNormalization(),
            keras.layers.Dropout(0.2),
            keras.layers.Dense(2),
        ]
    )


def parts(kind, reduction="mean"):
    """Returns the loss, and what makes a state of a key."""
    if kind == "keras":
        net = keras_model()
        model = bridge.from_keras(net)

        def make(key):
            seed = int(jax.random.randint(key, (), 0, 2**20))
            for layer in net.layers:
                if hasattr(layer, "kernel"):
                    # The layer's own initializer has a seed, and would return the same values.
                    initialize = keras.initializers.GlorotUniform(seed)
                    layer.kernel.assign(initialize(layer.kernel.shape))
            return bridge.create_state(net, TX, rng=key)

        return ft.supervised(model, LOSS, reduction=reduction), make, net
    model = ft.from_linen(Linen()) if kind == "linen" else ft.from_nnx(lambda rngs: Nnx(rngs))

    def make(key):
        params, model_state = model.init(key, X[:1])
        return ft.TrainState.create(params=params, model_state=model_state, tx=TX, rng=key)

    return ft.supervised(model, LOSS, reduction=reduction), make, None


@pytest.mark.parametrize(
    "kind", ["keras", *(pytest.param(kind, marks=pytest.mark.long) for kind in ("linen", "nnx"))]
)
def test_members_of_any_kind_of_model_train_as_they_would_alone(kind) -> None:
    loss, make, net = parts(kind)
    step = ft.train_step(loss, TX, metrics={"accuracy": ft.metrics.accuracy()})
    begin = P.create(make, KEY, members=2)
    states = [make(jax.random.fold_in(KEY, i)) for i in range(2)]
    together, history = ft.fit(begin, P.step(step), loader(), epochs=2, verbose=0)
    for i, state in enumerate(states):
        alone, of_one = ft.fit(state, step, loader(), epochs=2, verbose=0)
        assert_close(together[i], alone, rtol=1e-3, atol=1e-5)
        np.testing.assert_allclose(
            history.epochs["accuracy"][:, i], of_one.epochs["accuracy"], atol=1e-6
        )
    first, second = (together[i].params for i in range(2))
    assert not np.array_equal(jax.tree.leaves(first)[-1], jax.tree.leaves(second)[-1])
    if net is not None:
        values = ft.evaluate(together, P.step(ft.eval_step(loss)), loader(shuffle=False))["loss"]
        bridge.to_keras(P.select(together, values, mode="min"), net)
        net.compile(loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True))
        assert np.isclose(net.evaluate(X, Y, verbose=0), values.min(), rtol=1e-5)


@pytest.mark.parametrize("kind", ["keras", "nnx"])
def test_folds_of_a_cross_validation_are_scored_on_their_own_rows(kind) -> None:
    loss, make, _ = parts(kind, "weighted_mean")
    folds = np.arange(len(X), dtype=np.int32) % 3

    def weighted(params, model_state, batch, *, rng, training):
        x, y, fold = batch
        weight = jnp.where((fold == model_state["fold"]) != training, 1.0, 0.0)
        inner = model_state["model"]
        value, aux = loss(params, inner, (x, y, weight), rng=rng, training=training)
        return value, aux.replace(model_state={**model_state, "model": aux.model_state})

    state = make(KEY)
    state = state.replace(model_state={"model": state.model_state, "fold": jnp.int32(0)})
    members = P.stack([state] * 3)
    members = P.with_hyperparameters(members, {"model_state/fold": np.arange(3, dtype=np.int32)})
    data = ft.ArrayLoader((X, Y, folds), 32, shuffle=True)
    members, _ = ft.fit(members, P.step(ft.train_step(weighted, TX)), data, verbose=0)
    metrics = {"accuracy": ft.metrics.accuracy()}
    score = P.step(ft.eval_step(weighted, metrics=metrics))
    values = ft.evaluate(members, score, ft.ArrayLoader((X, Y, folds), 20))
    for i, member in enumerate(members):
        rows = folds == i
        batch = X[rows], Y[rows], np.ones(rows.sum(), np.float32)
        inner = member.model_state["model"]
        expected, aux = loss(member.params, inner, batch, rng=None, training=False)
        np.testing.assert_allclose(values["loss"][i], expected, rtol=1e-5)
        predictions = np.argmax(aux.outputs, -1)
        np.testing.assert_allclose(values["accuracy"][i], (predictions == Y[rows]).mean())


@pytest.mark.parametrize("library", ["nnx", "equinox"])
def test_members_that_start_as_equals_although_their_keys_differ_are_warned_of(library) -> None:
    def create(model, **options):
        def make(key):
            params, model_state = model.init(key, X[:1])
            return ft.TrainState.create(params=params, model_state=model_state, tx=TX, rng=key)

        return P.create(make, KEY, members=3, **options)

    def make_net(key):
        if library == "nnx":
            return Nnx(nnx.Rngs(key) if isinstance(key, jax.Array) else key)
        return eqx.nn.Linear(8, 2, key=key)

    convert = ft.from_nnx if library == "nnx" else ft.from_equinox
    with pytest.warns(UserWarning, match="the same for all members"):
        create(convert(make_net(KEY)))
    members = create(convert(make_net))  # warnings are errors
    for i in range(3):
        key = jax.random.fold_in(KEY, i)
        expected, _ = convert(make_net(key)).init(key, X[:1])
        jax.tree.map(np.testing.assert_array_equal, members[i].params, expected)


@pytest.mark.parametrize("start", [jnp.zeros, jnp.ones])
def test_members_that_start_as_constants_are_not_warned_of(start) -> None:
    P.create(lambda key: ft.TrainState.create(params=start((2, 3)), tx=TX), KEY, members=2)
