"""Keras models as linen modules: the same variables, the same outputs, there and back."""

import bridge  # isort: skip  # before keras: it chooses the backend

from collections.abc import Callable
from typing import Any

import flax
import flax.errors
import flax.linen as nn
import jax
import keras
import numpy as np
import pytest
from keras import layers

from bridge.model import _variables

X = np.random.default_rng(0).normal(size=(32, 6)).astype(np.float32)
MUTABLE = ["batch_stats", "losses"]


def net(seed: int = 0) -> keras.Model:
    keras.utils.set_random_seed(seed)
    return keras.Sequential(
        [
            keras.Input((6,)),
            layers.Dense(8, "relu", kernel_regularizer="l2", name="hidden"),
            layers.BatchNormalization(name="norm"),
            layers.Dropout(0.4, name="dropout"),
            layers.Dense(2, name="out"),
        ]
    )


def equal(a: Any, b: Any) -> None:
    assert jax.tree.structure(a) == jax.tree.structure(b)
    jax.tree.map(np.testing.assert_array_equal, a, b)


def require_same_as_from_keras(model: keras.Layer, x: Any) -> None:
    module, theirs = bridge.to_linen(model), bridge.from_keras(model)
    variables = module.init(jax.random.key(0), x)
    params, state = theirs.init(jax.random.key(0), x)
    equal(variables.get("params", {}), params)
    expected = jax.jit(theirs.apply)(params, state, x)
    equal(jax.jit(module.apply)(variables, x), expected.outputs)

    @jax.jit
    def trained(variables: Any, x: Any) -> Any:
        return module.apply(variables, x, training=True, mutable=MUTABLE)

    expected = jax.jit(lambda *a: theirs.apply(*a, training=True))(params, state, x)
    outputs, changed = trained(variables, x)
    equal(outputs, expected.outputs)
    losses = changed.pop("losses", {})
    equal([values[0] for values in losses.values()], list(expected.losses))
    equal(_variables.from_collections({**variables, **changed})[1], expected.model_state)


def test_a_model_equals_itself_in_linen() -> None:
    require_same_as_from_keras(net(), X)


@pytest.mark.long
def test_every_kind_of_model_equals_itself_in_linen(build: Callable[[], Any]) -> None:
    require_same_as_from_keras(*build())


def test_values_go_there_and_back_unchanged() -> None:
    model, other = net(0), net(1)
    module = bridge.to_linen(model)
    variables = module.init(jax.random.key(0), X)
    assert set(variables) == {"params", "batch_stats"}
    _, changed = module.apply(variables, X, training=True, mutable=MUTABLE)
    variables = {**variables, **changed}
    assert bridge.to_keras(flax.core.freeze(variables), other) is other
    np.testing.assert_array_equal(other(X), module.apply(variables, X))
    equal({k: v for k, v in variables.items() if k != "losses"},
          dict(bridge.to_linen(other).init(jax.random.key(9), X)))  # fmt: skip
    model(X, training=True)  # what Keras itself makes of the same step
    for a, b in zip(model.variables, other.variables, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-6, atol=1e-7, err_msg=a.path)


def test_a_key_serves_dropout_and_leaves_the_counters() -> None:
    module = bridge.to_linen(net())
    variables = module.init(jax.random.key(0), X)

    def apply(rngs: Any) -> Any:
        return module.apply(variables, X, training=True, rngs=rngs, mutable=["batch_stats"])

    a, b, c = (apply({"dropout": jax.random.key(i)})[0] for i in (1, 1, 2))
    np.testing.assert_array_equal(a, b)
    assert np.any(a != c)
    np.testing.assert_array_equal(apply(jax.random.key(4))[0], apply(jax.random.key(4))[0])
    for rngs, is_drawn in (({"dropout": jax.random.key(1)}, False), ({}, True)):
        seeds = [x["batch_stats"]["dropout"] for x in (variables, apply(rngs)[1])]
        assert (not np.array_equal(*map(jax.tree.leaves, seeds))) == is_drawn
    with pytest.raises(flax.errors.ModifyScopeVariableError, match='"batch_stats" is immutable'):
        module.apply(variables, X, training=True)


class Backbone(nn.Module):
    model: Any

    def setup(self) -> None:
        self.backbone = bridge.to_linen(self.model)
        self.head = nn.Dense(3)

    def __call__(self, x: Any, train: bool) -> Any:
        return self.head(self.backbone(x, training=train))


def test_a_keras_model_is_part_of_a_linen_module() -> None:
    model = net()
    whole = Backbone(model)
    variables = whole.init(jax.random.key(0), X, train=False)
    assert sorted(variables["params"]) == ["backbone", "head"]
    inner = bridge.to_linen(model).init(jax.random.key(0), X)
    equal(variables["params"]["backbone"], inner["params"])
    head = variables["params"]["head"]
    expected = model(X) @ head["kernel"] + head["bias"]
    np.testing.assert_allclose(whole.apply(variables, X, train=False), expected, rtol=1e-5)
