"""A small classifier, its data, and a population of it."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import functrain as ft

RNG = np.random.default_rng(0)
X = RNG.normal(size=(96, 8)).astype(np.float32)
Y = (X[:, 0] * X[:, 1] > 0).astype(np.int32)
RATES = np.array([0.3, 0.1, 0.03], np.float32)
MEMBERS = len(RATES)
KEY = jax.random.key(7)


def init(key: jax.Array, x: Any) -> Any:
    a, b = jax.random.split(key)
    params = {
        "a": jax.random.normal(a, (8, 16)) / 3,
        "b": jax.random.normal(b, (16, 2)) / 4,
        "c": jnp.zeros(2),
    }
    return params, {"seen": jnp.zeros((), jnp.int32)}


def apply(params: Any, model_state: Any, x: Any, *, rng: Any = None, training: bool = False) -> Any:
    h = jnp.tanh(x @ params["a"])
    if training:
        model_state = {"seen": model_state["seen"] + len(x)}
    return ft.ModelOutput(h @ params["b"] + params["c"], model_state)


def with_dropout(
    params: Any, model_state: Any, x: Any, *, rng: Any = None, training: bool = False
) -> Any:
    h = jnp.tanh(x @ params["a"])
    if training:
        h = h * jax.random.bernoulli(rng, 0.9, h.shape) / 0.9
        model_state = {"seen": model_state["seen"] + len(x)}
    return ft.ModelOutput(h @ params["b"] + params["c"], model_state)


MODEL = ft.Model(init, apply)
CROSS_ENTROPY = optax.softmax_cross_entropy_with_integer_labels
LOSS = ft.supervised(MODEL, CROSS_ENTROPY)
DROPOUT_LOSS = ft.supervised(ft.Model(init, with_dropout), CROSS_ENTROPY)
TX = optax.inject_hyperparams(optax.sgd)(learning_rate=0.1, momentum=0.9)
METRICS = {"accuracy": ft.metrics.accuracy()}
PLAIN = ft.train_step(LOSS, TX)
METERED = ft.train_step(DROPOUT_LOSS, TX, metrics=METRICS)
EVAL = ft.eval_step(LOSS, metrics=METRICS)


@functools.cache
def of_all(member: Any, **how: Any) -> Any:
    """The step of a population, one object for all tests: compiled once."""
    return ft.population.step(member, **how)


def make_state(key: jax.Array) -> ft.TrainState:
    params, model_state = MODEL.init(key, X)
    return ft.TrainState.create(params=params, model_state=model_state, tx=TX, rng=key)


def population() -> ft.population.PopulationState:
    rates = {"learning_rate": RATES}
    return ft.population.create(make_state, KEY, hyperparameters=rates)


def alone(i: int, make_state: Any = make_state, rates: Any = RATES) -> ft.TrainState:
    """Member i, made without a population."""
    state = make_state(jax.random.fold_in(KEY, i))
    rate = {**state.opt_state.hyperparams, "learning_rate": jnp.asarray(rates[i])}
    return state.replace(opt_state=state.opt_state._replace(hyperparams=rate))


def loader(batch_size: int = 16, **how: Any) -> ft.ArrayLoader:
    return ft.ArrayLoader((X, Y), batch_size, **{"shuffle": True, **how})


def refused(error: type[Exception], match: str, call: Any, *args: Any, **how: Any) -> None:
    """Raises unless a call raises an error with this message."""
    with pytest.raises(error, match=match):
        call(*args, **how)


def bits(tree: Any) -> list[bytes]:
    leaves = jax.tree.leaves(tree)
    return [
        np.asarray(
            jax.random.key_data(x) if jnp.issubdtype(x.dtype, jax.dtypes.prng_key) else x
        ).tobytes()
        for x in leaves
    ]


def assert_close(got: Any, expected: Any, **how: Any) -> None:
    """As last bits allow: the compiler may order sums otherwise for many members than for one."""
    assert jax.tree.structure(got) == jax.tree.structure(expected)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True):
        assert a.dtype == b.dtype
        if jnp.issubdtype(a.dtype, jnp.floating):
            np.testing.assert_allclose(a, b, **{"rtol": 1e-4, "atol": 1e-6, **how})
        else:
            assert bits([a]) == bits([b])
