"""Flax modules as Keras layers: they train and read like layers, and keep flax's values."""

import bridge  # isort: skip  # before keras: it chooses the backend

from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import keras
import numpy as np
import optax
import pytest
from flax import nnx
from keras import layers

import functrain as ft
from tests.bridge.flax_cases import (
    MAKE,
    Net,
    X,
    Y,
    make_nnx,
    model_of,
    require_same,
)


@pytest.fixture(
    params=[
        n if n != "linen without switches" else pytest.param(n, marks=pytest.mark.long)
        for n in MAKE
    ]
)
def make(request: pytest.FixtureRequest) -> Callable[[], Any]:
    return MAKE[request.param]


@pytest.mark.smoke
def test_bridge_fit_equals_keras_fit_to_the_bit(make: Callable[[], Any]) -> None:
    found = []
    for fit in (keras.Model.fit, bridge.fit):
        model = model_of(make())
        model.compile(keras.optimizers.Adam(0.01), "mse", metrics=["mae"])
        exact = {"fuse": 3, "rewrites": "exact"} if fit is bridge.fit else {}
        history = fit(model, X, Y, batch_size=8, epochs=2, verbose=0, **exact).history
        found.append((model, history))
    assert found[0][1] == found[1][1]
    require_same(found[0][0], found[1][0])


def test_the_layer_gives_what_the_module_gives(make: Callable[[], Any]) -> None:
    layer = bridge.from_flax(make(), seed=1)
    outputs = layer(X)
    values = layer.to_flax()
    if isinstance(layer.module, nn.Module):
        switch = {"train": False} if isinstance(layer.module, Net) else {}
        np.testing.assert_array_equal(outputs, layer.module.apply(values, X, **switch))
    else:
        values.eval()
        np.testing.assert_array_equal(outputs, values(X))


def test_training_moves_statistics_as_flax_does() -> None:
    layer = bridge.from_flax(Net(), seed=1)
    layer.build(X.shape)
    before = layer.to_flax()
    seed = layer.seed_generator.state.value
    outputs = layer(X, training=True)
    key = jax.random.wrap_key_data(jnp.asarray(seed), impl="threefry2x32")
    expected, changed = layer.module.apply(
        before, X, train=True, rngs=key, mutable=["batch_stats", "losses"]
    )
    np.testing.assert_array_equal(outputs, expected)
    after = layer.to_flax()
    jax.tree.map(np.testing.assert_array_equal, after["batch_stats"], changed["batch_stats"])
    jax.tree.map(np.testing.assert_array_equal, after["params"], before["params"])
    np.testing.assert_array_equal(layer.losses, changed["losses"]["size"])


def test_values_come_and_go_unchanged() -> None:
    variables = Net().init(jax.random.key(7), X, train=False)
    layer = bridge.from_flax(Net(), variables=variables)
    layer(X)
    kept = {name: variables[name] for name in ("params", "batch_stats")}
    jax.tree.map(np.testing.assert_array_equal, layer.to_flax(), kept)

    module = make_nnx()
    layer = bridge.from_flax(module)
    layer(X, training=True)
    back = layer.to_flax()
    ours, theirs = (nnx.to_pure_dict(nnx.state(m, nnx.Param)) for m in (back, module))
    jax.tree.map(np.testing.assert_array_equal, ours, theirs)
    assert np.any(back.norm.mean[...] != module.norm.mean[...])  # the module itself stays


def test_weights_read_like_the_module() -> None:
    model = model_of(Net())
    flax = model.layers[1]
    paths = [weight.path.split("flax/")[1] for weight in flax.weights]
    assert paths == [
        "batch_stats/BatchNorm_0/mean",
        "batch_stats/BatchNorm_0/var",
        "params/BatchNorm_0/bias",
        "params/BatchNorm_0/scale",
        "params/Dense_0/bias",
        "params/Dense_0/kernel",
    ]
    assert all(w.path.split("/")[2] == "params" for w in flax.trainable_weights)
    params, state = bridge.from_keras(model).init(jax.random.key(0), None)
    assert params["flax"]["params"]["Dense_0"]["kernel"].shape == (6, 8)
    assert state["flax"]["batch_stats"]["BatchNorm_0"]["mean"].shape == (8,)
    nnx_paths = [w.path.split("flax/")[1] for w in model_of(make_nnx).layers[1].weights]
    assert "params/blocks/0/kernel" in nnx_paths
    assert "state/norm/mean" in nnx_paths


def test_the_open_way_takes_a_flax_layer_along(make: Callable[[], Any]) -> None:
    model = model_of(make())
    tx = optax.adam(0.01)
    loss_fn = ft.supervised(bridge.from_keras(model), bridge.loss("mse"))
    state = bridge.create_state(model, tx, rng=jax.random.key(0))
    step, loader = ft.train_step(loss_fn, tx), ft.ArrayLoader((X, Y), 8)
    end, history = ft.fit(state, step, loader, epochs=2, verbose=0)
    assert history.epochs["loss"][1] < history.epochs["loss"][0]
    bridge.to_keras(end, model)
    after = bridge.create_state(model, tx)
    jax.tree.map(np.testing.assert_array_equal, after.params, end.params)


def test_runs_repeat_with_the_seed_and_dropout_changes_from_call_to_call() -> None:
    first, second, other = (bridge.from_flax(Net(), seed=seed) for seed in (1, 1, 2))
    x = X[:4]
    values = first(x)
    np.testing.assert_array_equal(values, second(x))
    assert np.any(values != other(x))
    once = first(x, training=True)
    np.testing.assert_array_equal(once, second(x, training=True))
    assert np.any(once != first(x, training=True))
    keras.utils.set_random_seed(5)
    a = bridge.from_flax(Net())(x)
    keras.utils.set_random_seed(5)
    np.testing.assert_array_equal(a, bridge.from_flax(Net())(x))


class Tokens(nn.Module):
    @nn.compact
    def __call__(self, inputs: dict[str, Any]) -> dict[str, Any]:
        embedded = nn.Embed(10, 3)(inputs["tokens"]).mean(1)
        return {"sum": embedded + inputs["bias"], "bias": inputs["bias"]}


def test_inputs_and_outputs_are_pytrees_of_any_dtype() -> None:
    tokens = keras.Input((5,), dtype="int32", name="tokens")
    bias = keras.Input((3,), name="bias")
    outputs = bridge.from_flax(Tokens())({"tokens": tokens, "bias": bias})
    model = keras.Model({"tokens": tokens, "bias": bias}, outputs)
    assert outputs["sum"].shape == (None, 3)
    batch = {"tokens": np.ones((2, 5), int), "bias": np.zeros((2, 3), np.float32)}
    assert model.predict(batch, verbose=0)["sum"].shape == (2, 3)


def test_mixed_precision_computes_in_half_and_keeps_statistics_whole() -> None:
    layer = bridge.from_flax(Net(), dtype="mixed_bfloat16")
    assert layer(X).dtype == jnp.bfloat16
    assert {w.dtype for w in layer.weights} == {"float32"}
    layer(X + 1, training=True)
    mean = layer.to_flax()["batch_stats"]["BatchNorm_0"]["mean"]
    assert np.any(mean != mean.astype(jnp.bfloat16))


class Whole(keras.Model):
    def __init__(self, module: Any) -> None:
        super().__init__()
        self.flax = bridge.from_flax(module, seed=4)
        self.head = layers.Dense(2)

    def call(self, x: Any) -> Any:
        return self.head(self.flax(x))


def test_a_model_may_be_built_by_its_first_batch(make: Callable[[], Any]) -> None:
    keras.utils.set_random_seed(0)
    model, twin = Whole(make()), Whole(make())
    model.compile("sgd", "mse")
    model.fit(X, Y, verbose=0, batch_size=20)
    assert np.isfinite(model.predict(X, verbose=0)).all()
    twin.flax(X)
    fresh = bridge.from_flax(make(), seed=4)
    fresh(X)
    for a, b in zip(twin.flax.weights, fresh.weights, strict=True):
        np.testing.assert_array_equal(a, b)


def test_a_frozen_layer_keeps_its_parameters() -> None:
    model = model_of(Net())
    model.layers[1].trainable = False
    before = model.layers[1].to_flax()["params"]
    model.compile("sgd", "mse")
    model.fit(X, Y, verbose=0)
    jax.tree.map(np.testing.assert_array_equal, model.layers[1].to_flax()["params"], before)
    assert len(model.trainable_variables) == 4


@pytest.mark.parametrize("module", [Net, layers.Dense(2), lambda: 3])
def test_what_is_no_flax_module_is_refused(module: Any) -> None:
    with pytest.raises(TypeError, match=r"an instance of a linen or nnx module.*Construct"):
        bridge.from_flax(module)


def test_values_that_do_not_fit_are_refused() -> None:
    with pytest.raises(ValueError, match="variables: expected None with an nnx module"):
        bridge.from_flax(make_nnx(), variables={"params": {}})
    with pytest.raises(ValueError, match="expected a built layer"):
        bridge.from_flax(Net()).to_flax()
