"""bridge.optimizer(..., native=True): optax's own pieces, as near as its table says."""

import bridge  # isort: skip  # before keras: it chooses the backend

from typing import Any

import jax
import jax.numpy as jnp
import keras
import numpy as np
import optax
import pytest
from keras import layers

from bridge.optim._slots import KerasOptState
from tests.bridge.optimizer_cases import CASES, ByKeras, K, make_params, wild_gradients

WRAPPED = {
    "SGD nesterov, decay", "Adam amsgrad", "Adam ema", "Adam accumulation, schedule",
    "RMSprop centered", "Adafactor", "Nadam", "Ftrl", "Lamb decay", "Muon", "ScheduleFreeAdamW",
    "LossScaleOptimizer", "MultiOptimizer",
}  # fmt: skip
BFLOAT16 = {"Lion": 4e-2, "Lion decay": 4e-2}
QUICK = {"Adam clipnorm", "SGD momentum, schedule"}


@pytest.mark.parametrize("name", sorted(WRAPPED))
def test_what_optax_does_not_have_is_wrapped(name: str) -> None:
    tx = bridge.optimizer(CASES[name](), native=True)
    assert isinstance(tx.init(make_params()), KerasOptState)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(
    "name",
    [
        n if n in QUICK else pytest.param(n, marks=pytest.mark.long)
        for n in CASES
        if n not in WRAPPED
    ],
)
def test_optax_stays_as_near_to_keras_as_the_table_says(name: str, dtype: str) -> None:
    if (name, dtype) == ("Lamb", "bfloat16"):
        pytest.skip("its norms have 8 bits in bfloat16: the table gives no bound")
    params = make_params(dtype)
    theirs, tx = ByKeras(CASES[name](), params), bridge.optimizer(CASES[name](), native=True)
    state = tx.init(params)
    assert not isinstance(state, KerasOptState)

    @jax.jit
    def step(grads, state, params):
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    for grads in wild_gradients(params):
        params, state = step(grads, state, params)
        theirs.step(grads)
    largest = max(np.max(np.abs(np.asarray(x, np.float64))) for x in theirs.params)
    bound = 1e-6 if dtype == "float32" else BFLOAT16.get(name, 2e-2)
    for x, y in zip(theirs.params, jax.tree.leaves(params), strict=True):
        assert np.max(np.abs(np.asarray(x, np.float64) - np.asarray(y))) <= bound * largest
    assert int(state[-1].iterations) == 100


def test_optaxs_own_adam_is_further_off() -> None:
    """Why there is an Adam of our own: optax adds eps to the corrected root."""
    params = {"w": jnp.zeros(1)}
    grads = {"w": jnp.full(1, 1e-7)}
    ours = bridge.optimizer(K.Adam(1.0), native=True)
    theirs = bridge.optimizer(K.Adam(1.0))
    steps = [
        float(tx.update(grads, tx.init(params), params)[0]["w"][0])
        for tx in (ours, theirs, optax.adam(1.0, eps=1e-7))
    ]
    np.testing.assert_allclose(steps[0], steps[1], rtol=1e-6)
    assert abs(steps[2] / steps[1]) > 10


def test_native_pieces_keep_a_models_constraints() -> None:
    dense = layers.Dense(2, kernel_constraint="non_neg", name="out")
    model = keras.Sequential([keras.Input((3,)), dense])
    tx = bridge.optimizer(K.SGD(1.0), model=model, native=True)
    state: Any = bridge.create_state(model, tx)
    state = state.apply_gradients(jax.tree.map(jnp.ones_like, state.params), tx)
    assert np.min(state.params["out"]["kernel"]) == 0
