"""One place for run-ahead, programs, and what is left when a program fails."""

import contextlib
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import functrain as ft
from functrain.data._adapt import as_batches
from functrain.engine import _driver, _plan
from functrain.engine._driver import RUN_AHEAD, Driver
from functrain.engine._plan import Plan, nbytes

X = np.arange(64, dtype=np.float32)


def chunks(k: int = 2, batch: int = 2) -> Any:
    batches = as_batches(ft.ArrayLoader(X, batch))
    return _plan.chunks(batches, Plan(k))


def silent(state: Any, batch: Any) -> Any:
    return state + batch.sum(), {}


def test_a_step_without_logs_is_not_run_ahead_of_either(monkeypatch) -> None:
    waited = []
    wait = jax.block_until_ready
    monkeypatch.setattr(jax, "block_until_ready", lambda x: waited.append(0) or wait(x))
    driver = Driver(silent)
    driver.begin(jnp.zeros(()))
    for number, chunk in enumerate(chunks(), start=1):
        driver.run(chunk)
        assert len(waited) == max(0, number - RUN_AHEAD)
    assert float(driver.carry) == X.sum()


def test_constants_are_left_alone() -> None:
    kind = _driver.Kind("sum", lambda step: lambda carry, batch, const: (carry + const * batch, ()))
    driver = Driver(silent, kind)
    const = jnp.full(2, 3.0)
    driver.begin(jnp.zeros(2), const)
    for chunk in chunks():
        driver.run(chunk)
    np.testing.assert_array_equal(driver.carry, 3 * X.reshape(-1, 2).sum(0))
    assert not const.is_deleted()


@pytest.mark.parametrize("fails", [True, False])
def test_a_driver_knows_whether_a_program_left_its_carry(fails) -> None:
    def check(x: Any) -> None:
        if x == 20 and fails:
            raise RuntimeError("from the host")

    def step(state: Any, batch: Any) -> Any:
        jax.debug.callback(check, batch[0])
        return state + batch.sum(), {}

    driver = Driver(step)
    driver.begin(jnp.zeros(()))
    with contextlib.suppress(jax.errors.JaxRuntimeError):
        for chunk in chunks():
            driver.run(chunk)
    assert driver.is_complete() != fails
    assert fails or float(driver.carry) == X.sum()


def test_large_outputs_make_for_shorter_programs() -> None:
    sizes = []

    def step(state: Any, x: Any) -> Any:
        return state, jnp.zeros((x.shape[0], 2**19)) + x[:, None]  # 2 MiB an example

    def seen(fuse: Any) -> int:
        data = ft.ArrayLoader(X, 4)
        batches, plan = as_batches(data), Plan(fuse, row_bytes=rows)
        next(_plan.chunks(batches, plan))
        return plan.first.k

    def rows(batch: Any) -> int:
        sizes.append(nbytes(jax.eval_shape(step, 0.0, batch)[1]))
        return sizes[-1]

    assert seen("auto") == 7  # 64 MiB
    assert sizes == [8 * 2**20]


@pytest.mark.parametrize(
    ("step", "message"),
    [
        (
            lambda state, batch: state,
            r"step: expected it to return \(state, logs\), got float32\[\]",
        ),
        (lambda state, batch: (jnp.int32(0), {}), r"expected float32\[\], got int32\[\]"),
    ],
)
@pytest.mark.parametrize("jit", [True, False])
def test_a_step_is_held_to_its_kind_uncompiled_too(step, message, jit) -> None:
    with pytest.raises(TypeError, match=message):
        list(ft.run(jnp.zeros(()), step, [X], jit=jit))
