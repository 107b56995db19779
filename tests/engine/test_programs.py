"""Programs are found by what they were traced from, as far as Python shows it."""

import functools
import gc
import weakref
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

import functrain as ft


class Trainer:
    """A step with attributes, which are constants of its programs."""

    rate: Any = 1.0

    def __init__(self) -> None:
        self.traces = 0
        self.note = "unchanged"
        self.limit = float("nan")

    def __call__(self, state: Any, batch: Any) -> Any:
        self.traces += 1
        return state + self.rate, {"rate": self.rate}

    method = __call__


def fit(step: Any) -> float:
    return float(ft.fit(jnp.zeros(()), step, ft.NoData(5), fuse=2, verbose=0).state)


def fused(step: Any) -> float:
    return float(ft.fuse(step, 5)(jnp.zeros(()), ())[0])


def uncompiled(step: Any) -> float:
    return float(ft.fit(jnp.zeros(()), step, ft.NoData(5), jit=False, verbose=0).state)


@pytest.mark.parametrize("run", [fit, fused, uncompiled])
@pytest.mark.parametrize("get", [lambda x: x, lambda x: x.method], ids=["object", "method"])
@pytest.mark.parametrize(
    "rates",
    [(10.0, 1.0), (jnp.float32(10), jnp.float32(1)), (np.full((), 10.0), np.ones(())), (10, True)],
    ids=["numbers", "jax", "numpy", "a bool is not 1"],
)
def test_a_changed_attribute_is_in_the_next_fit(run, get, rates) -> None:
    trainer = Trainer()
    assert run(get(trainer)) == 5
    for rate in rates:
        trainer.rate = rate
        assert run(get(trainer)) == 5 * float(rate)


def test_a_changed_attribute_is_in_the_next_evaluation_and_prediction() -> None:
    class Predictor:
        scale = 1.0

        def __call__(self, state: Any, x: Any) -> Any:
            return state, self.scale * x

    predictor, data = Predictor(), ft.ArrayLoader(np.ones(4, np.float32), 2)
    assert ft.predict((), predictor, data).sum() == 4
    predictor.scale = 2.0
    assert ft.predict((), predictor, data).sum() == 8


@pytest.mark.parametrize("get", [lambda x: x, lambda x: x.method], ids=["object", "method"])
def test_what_did_not_change_is_compiled_once(get) -> None:
    trainer = Trainer()
    fit(get(trainer))
    traces = trainer.traces
    fit(get(trainer))
    fit(get(trainer))
    assert trainer.traces == traces
    alive = weakref.ref(trainer)
    del trainer
    gc.collect()
    assert alive() is None


def test_an_attribute_is_not_kept_alive() -> None:
    trainer = Trainer()
    trainer.rate = jnp.ones(17)[0]
    rate = weakref.ref(trainer.rate)
    fit(trainer)
    trainer.rate = 1.0
    fit(trainer)
    gc.collect()
    assert rate() is None


def test_the_arguments_of_a_partial_are_its_own() -> None:
    def step(rate: float, state: Any, batch: Any) -> Any:
        return state + rate, {}

    assert [fit(functools.partial(step, rate)) for rate in (1.0, 2.0)] == [5, 10]
