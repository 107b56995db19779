"""Keras's recurrent layers as the rewrites for TPUs compute them."""

from typing import Any

import jax
import jax.numpy as jnp
import keras
import numpy as np
import pytest
from keras import layers

from functrain.rewrites._equations import walk_equations
from functrain.rewrites._optimize import rules_for
from functrain.rewrites._pass import rewrite_jaxpr

LAYERS = {
    "LSTM": lambda: layers.LSTM(8),
    "GRU": lambda: layers.GRU(8, return_sequences=True, return_state=True),
    "GRU of Keras 1": lambda: layers.GRU(8, reset_after=False),
    "SimpleRNN": lambda: layers.SimpleRNN(8, go_backwards=True),
    "go_backwards": lambda: layers.LSTM(8, go_backwards=True, return_sequences=True),
    "stateful": lambda: layers.LSTM(8, stateful=True),
    "dropout": lambda: layers.LSTM(8, dropout=0.2, recurrent_dropout=0.2, seed=1),
    "both directions": lambda: layers.Bidirectional(layers.LSTM(8, return_sequences=True)),
    "two cells": lambda: layers.RNN([layers.LSTMCell(8), layers.GRUCell(8)]),
}


@pytest.mark.parametrize("name", LAYERS)
def test_a_layer_and_its_gradients_agree(name: str) -> None:
    keras.utils.set_random_seed(0)
    layer = LAYERS[name]()
    x = jnp.asarray(np.random.default_rng(0).normal(size=(4, 5, 3)), jnp.float32)
    mask = None if name == "LSTM" else jnp.arange(5) < jnp.array([[5], [3], [1], [4]])
    layer.build(x.shape)
    weights = [variable.value for variable in layer.trainable_variables]
    others = [variable.value for variable in layer.non_trainable_variables]

    def fn(weights: Any, x: Any) -> Any:
        def loss(weights: Any, x: Any) -> Any:
            out = layer.stateless_call(weights, others, x, mask=mask, training=True)
            return sum(jnp.sum(leaf**2) for leaf in jax.tree.leaves(out[0])), out

        return jax.value_and_grad(loss, argnums=(0, 1), has_aux=True)(weights, x)

    jaxpr = jax.make_jaxpr(fn)(weights, x)
    want = jax.tree.leaves(jax.jit(fn)(weights, x))
    rewritten = rewrite_jaxpr(jaxpr, rules_for("tpu"))
    scans = [eqn for eqn, *_ in walk_equations(rewritten) if eqn.primitive.name == "scan"]
    assert {eqn.params["unroll"] for eqn in scans} == {5}
    got = jax.jit(jax.extend.core.jaxpr_as_fun(rewritten))(*weights, x)
    for new, old in zip(got, want, strict=True):
        np.testing.assert_allclose(new, old, rtol=1e-4, atol=1e-5)
