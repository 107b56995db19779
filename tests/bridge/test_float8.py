"""Float8 scales: their gradients are their new values, in every way to train a model."""

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
from flax.linen.fp8_ops import OVERWRITE_WITH_GRADIENT as SCALES
from flax.training.train_state import TrainState as FlaxState
from keras import layers

import functrain as ft

K = keras.optimizers
X = np.random.default_rng(0).normal(size=(48, 8)).astype(np.float32)
Y = np.random.default_rng(1).normal(size=(48, 2)).astype(np.float32)
DATA = ft.ArrayLoader((X, Y), 16)


class Net(nn.Module):
    @nn.compact
    def __call__(self, x: Any) -> Any:
        x = nn.relu(nn.Dense(4, dot_general_cls=nn.fp8_ops.Fp8DirectDotGeneralOp, name="a")(x))
        return nn.Dense(2, dot_general_cls=nn.fp8_ops.Fp8DirectDotGeneralOp, name="b")(x)


def net() -> keras.Model:
    keras.utils.set_random_seed(0)
    model = keras.Sequential(
        [keras.Input((8,)), layers.Dense(4, "relu", name="a"), layers.Dense(2, name="b")]
    )
    for layer in model.layers:
        layer.quantize("float8")
    return model


def by_keras(optimizer: Any, x: Any = X, y: Any = Y, **arguments: Any) -> keras.Model:
    model = net()
    model.compile(optimizer, "mse")
    model.fit(x, y, shuffle=False, verbose=0, **{"batch_size": 16, **arguments})
    return model


def train(model: Any, state: ft.TrainState, tx: Any, size: int | None = None) -> ft.TrainState:
    loss_fn = ft.supervised(model, bridge.loss("mse"))
    loss_fn = loss_fn if size is None else ft.micro_batches(loss_fn, size)
    return ft.fit(state, ft.train_step(loss_fn, tx), DATA, rewrites="off", verbose=0).state


def scales(model: keras.Model) -> dict[str, np.ndarray]:
    names = ["/".join(v.path.split("/")[-2:]) for v in model.variables]
    pairs = zip(names, model.variables, strict=True)
    return {name: np.asarray(v.value) for name, v in pairs if v.overwrite_with_gradient}


def assert_close(ours: Any, theirs: Any) -> None:
    # A program that rounds one product otherwise moves a scale by some roundings.
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6), ours, theirs)


WAYS: dict[str, Callable[[keras.Model], Any]] = {
    "optax": lambda model: optax.adam(1e-2, eps=1e-7),
    "decay, clipping and norms": lambda model: optax.chain(
        ft.tx.log_norm(), optax.clip_by_global_norm(1e9), optax.adamw(1e-2, weight_decay=0.0)
    ),
    "groups": lambda model: ft.tx.param_groups(
        {"a/**": optax.adam(1e-2, eps=1e-7), "**": optax.adam(1e-2, eps=1e-7)}
    ),
    "skip_non_finite": lambda model: ft.tx.skip_non_finite(optax.adam(1e-2, eps=1e-7)),
    "bridge.optimizer(model=)": lambda model: bridge.optimizer(K.Adam(1e-2), model=model),
    "OptaxOptimizer": lambda model: bridge.optimizer(
        bridge.OptaxOptimizer(optax.adam(1e-2, eps=1e-7)), model=model
    ),
}


@pytest.mark.parametrize("way", WAYS)
def test_every_optimizer_leaves_the_scales_to_their_gradients(way: str) -> None:
    theirs, model = by_keras(K.Adam(1e-2)), net()
    tx = WAYS[way](model)
    state = train(bridge.from_keras(model), bridge.create_state(model, tx), tx)
    bridge.to_keras(state, model)
    assert len(scales(model)) == 12
    assert_close(scales(model), scales(theirs))
    np.testing.assert_allclose(model.get_weights()[0], theirs.get_weights()[0], atol=1e-4)


def test_micro_batches_take_the_largest_scales_as_accumulation_in_keras_does() -> None:
    # The i-th micro-batch has every fourth example from i on.
    x, y = (a.reshape(3, 4, 4, -1).swapaxes(1, 2).reshape(48, -1) for a in (X, Y))
    theirs = by_keras(K.Adam(1e-2, gradient_accumulation_steps=4), x, y, batch_size=4)
    model = net()
    tx = bridge.optimizer(K.Adam(1e-2))
    state = train(bridge.from_keras(model), bridge.create_state(model, tx), tx, size=4)
    bridge.to_keras(state, model)
    assert_close(scales(model), scales(theirs))


def by_flax(x: Any = X, *, frozen: str | None = None) -> FlaxState:
    """The three steps by flax's own TrainState, which overwrites the collection."""
    module = Net()
    variables = module.init(jax.random.key(0), x[:1])
    labels = {name: "frozen" if name == frozen else "trained" for name in ("a", "b")}
    by_label = {"frozen": optax.set_to_zero(), "trained": optax.adam(1e-2)}
    tx = optax.partition(by_label, labels)
    state = FlaxState.create(apply_fn=module.apply, params=variables, tx=tx)

    def loss(variables: Any, x: Any, y: Any) -> Any:
        return jnp.mean(optax.squared_error(module.apply(variables, x), y))

    for i in range(0, 48, 16):
        grads = jax.jit(jax.grad(loss))(state.params, x[i : i + 16], Y[i : i + 16])
        state = state.apply_gradients(grads=grads)
    return state


@pytest.mark.parametrize("way", ["whole", "frozen"])
def test_a_linen_module_trains_as_in_flax(way: str) -> None:
    tx = optax.adam(1e-2)
    model = ft.from_linen(Net())
    model = ft.freeze(model, "a/**") if way == "frozen" else model
    params, model_state = model.init(jax.random.key(0), X[:1])
    state = train(model, ft.TrainState.create(params=params, model_state=model_state, tx=tx), tx)
    theirs = by_flax(frozen="a" if way == "frozen" else None).params
    if way == "frozen":
        state = ft.merge_frozen(state)
    assert_close(dict(state.model_state[SCALES]), theirs[SCALES])
    assert_close(state.params, theirs["params"])


def test_adapters_leave_the_scales_to_their_gradients() -> None:
    model = ft.lora(ft.from_linen(Net()), "**/kernel", rank=2)
    tx = optax.sgd(0.0)
    params, model_state = model.init(jax.random.key(0), X[:1])
    state = ft.TrainState.create(params=params, model_state=model_state, tx=tx)
    state = train(model, state, tx)
    history = state.model_state.model[SCALES]["a"]["Fp8DirectDotGeneralOp_0"]
    assert float(jnp.max(history["input_amax_history"])) == np.abs(X).max()


def test_a_flax_layer_has_its_scales_overwritten_by_keras() -> None:
    variables = Net().init(jax.random.key(0), X[:1])
    layer = bridge.from_flax(Net(), variables=variables)
    model = keras.Sequential([keras.Input((8,)), layer])
    model.compile(bridge.OptaxOptimizer(optax.adam(1e-2)), "mse")
    model.fit(X, Y, batch_size=16, shuffle=False, verbose=0)
    theirs = by_flax().params
    assert_close(layer.to_flax()[SCALES], theirs[SCALES])


def test_a_frozen_layer_keeps_its_scales_as_in_keras() -> None:
    model = net()
    model.get_layer("a").trainable = False
    before = scales(model)
    tx = optax.sgd(0.1)
    state = train(bridge.from_keras(model), bridge.create_state(model, tx), tx)
    bridge.to_keras(state, model)
    after = scales(model)
    for path, value in before.items():
        assert np.array_equal(value, after[path]) == path.startswith("a/")


def test_a_keras_optimizer_that_accumulates_is_refused() -> None:
    tx = bridge.optimizer(K.Adam(gradient_accumulation_steps=2))
    with pytest.raises(ValueError, match=r"gradient_accumulation_steps.*micro_batches"):
        bridge.create_state(net(), tx)
