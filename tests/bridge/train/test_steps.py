"""The compiled model's own steps over a state of pytrees."""

import bridge  # isort: skip  # before keras: it chooses the backend

from typing import Any

import jax
import jax.numpy as jnp
import keras
import numpy as np
import pytest
from keras import layers

import functrain as ft

X = np.random.default_rng(0).normal(size=(5, 8, 4)).astype(np.float32)
Y = np.random.default_rng(1).normal(size=(5, 8, 4)).astype(np.float32)
BATCH = (X[0], Y[0])


def compiled(**kwargs: Any) -> keras.Model:
    keras.utils.set_random_seed(0)
    net = [keras.Input((4,)), layers.Dense(8), layers.BatchNormalization(), layers.Dropout(0.5)]
    model = keras.Sequential([*net, layers.Dense(4)])
    model.compile(**{"optimizer": "adam", "loss": "mse", "metrics": ["mae"], **kwargs})
    return model


def numbers(model: keras.Model) -> list[Any]:
    found = [*model.variables, *model.optimizer.variables, *model.metrics_variables]
    return [np.asarray(v.value) for v in found]


def assert_equal(a: Any, b: Any) -> None:
    jax.tree.map(np.testing.assert_array_equal, a, b)


def test_a_fused_train_step_equals_fit() -> None:
    ours, theirs = compiled(), compiled()
    state = bridge.keras_state(ours, BATCH)
    state, logs = ft.fuse(bridge.train_step(ours), 5, rewrites="exact")(state, (X, Y))
    assert {name: values.shape for name, values in logs.items()} == {"loss": (5,), "mae": (5,)}
    bridge.to_keras(state, ours)
    theirs.fit(X.reshape(40, 4), Y.reshape(40, 4), batch_size=8, shuffle=False, verbose=0)
    assert_equal(numbers(ours), numbers(theirs))


def test_test_step_equals_evaluate_and_leaves_the_optimizer() -> None:
    model = compiled()
    state = bridge.keras_state(model, BATCH)
    new, logs = jax.jit(bridge.test_step(model))(state, BATCH)
    expected = model.evaluate(*BATCH, batch_size=8, verbose=0, return_dict=True)
    assert {name: float(value) for name, value in logs.items()} == expected
    assert_equal(new.optimizer, state.optimizer)


def test_keras_state_and_to_keras_are_each_others_inverse() -> None:
    model = compiled()
    model.fit(*BATCH, verbose=0)
    before = numbers(model)
    state = bridge.keras_state(model)
    assert_equal(numbers(bridge.to_keras(state, model)), before)
    assert_equal(bridge.keras_state(model), state)


def test_neither_shares_a_buffer_with_the_model() -> None:
    model = compiled()
    state = bridge.keras_state(model, BATCH)
    jax.tree.map(lambda x: x.delete(), state)
    assert all(np.isfinite(x).all() for x in numbers(model))
    state = bridge.keras_state(model)
    bridge.to_keras(state, model)
    jax.tree.map(lambda x: x.delete(), state)
    assert all(np.isfinite(x).all() for x in numbers(model))


def test_train_step_works_under_vmap() -> None:
    model = compiled()
    state = bridge.keras_state(model, BATCH)
    many = jax.tree.map(lambda x: jnp.stack([x, x]), state)
    step = jax.vmap(bridge.train_step(model), in_axes=(0, None))
    new, logs = jax.jit(step)(many, BATCH)
    assert logs["loss"].shape == (2,)
    assert_equal(*(jax.tree.map(lambda x, i=i: x[i], new) for i in (0, 1)))


def test_a_state_before_the_first_batch_is_refused() -> None:
    with pytest.raises(ValueError, match=r"Pass one: bridge\.keras_state"):
        bridge.keras_state(compiled())


def test_a_state_of_another_kind_is_refused() -> None:
    with pytest.raises(TypeError, match="expected a KerasState"):
        bridge.train_step(compiled())([], BATCH)


def test_a_state_that_does_not_fit_is_refused_and_nothing_written() -> None:
    model = compiled()
    state = bridge.keras_state(model, BATCH)
    before = numbers(model)
    wrong = state.replace(
        trainable=[jnp.zeros((3, 3)), *state.trainable[1:]], metrics=state.metrics[1:]
    )
    with pytest.raises(ValueError, match=r"trainable/0: expected float32\[4, 8\]") as error:
        bridge.to_keras(wrong, model)
    assert "metrics/3: missing" in str(error.value)
    assert_equal(numbers(model), before)


@pytest.mark.parametrize("kind", ["train", "test"])
@pytest.mark.parametrize("make", [lambda loss: [loss], lambda loss: loss, lambda loss: None])
def test_logs_that_are_no_dict_are_refused(kind: str, make: Any) -> None:
    class Model(keras.Sequential):
        pass

    def step(self: Any, state: Any, data: Any) -> Any:
        logs, state = getattr(keras.Sequential, f"{kind}_step")(self, state, data)
        return make(logs["loss"]), state

    setattr(Model, f"{kind}_step", step)
    model = Model([keras.Input((4,)), layers.Dense(4)])
    model.compile("sgd", "mse")
    before = model.get_weights()
    with pytest.raises(TypeError, match=rf"Model\.{kind}_step: expected a dict of logs"):
        getattr(bridge, {"train": "fit", "test": "evaluate"}[kind])(model, *BATCH, verbose=0)
    assert_equal(model.get_weights(), before)
