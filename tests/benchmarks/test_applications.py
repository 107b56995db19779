"""Every architecture of keras.applications, rewritten, computes what it did."""

from typing import Any

import jax
import keras
import numpy as np
import pytest

import functrain as ft
from benchmarks.applications import NAMES, compare, distance, step_of

# Both programs round, each in its own order; and a move of the weights by their last place moves
# the gradients by no less than one of them.
TIMES_ROUNDING = 4


@pytest.mark.long
@pytest.mark.parametrize("name", NAMES)
def test_a_rewritten_step_differs_by_rounding_only(name: str) -> None:
    made = compare(name, rounds=0)
    assert made.difference <= TIMES_ROUNDING * made.rounding
    keras.backend.clear_session()


@pytest.mark.long
@pytest.mark.parametrize("name", ["MobileNetV2", "ResNet50", "ConvNeXtTiny"])  # no dropout
def test_a_rewritten_step_is_as_accurate_as_it_was(name: str) -> None:
    step, args = step_of(name)
    plain, rewritten = jax.jit(step)(*args)[1], jax.jit(ft.rewrites.optimize(step))(*args)[1]
    with jax.enable_x64(True):
        keras.config.set_dtype_policy("float64")
        try:
            wide_step, wide_args = step_of(name)
            exact = jax.jit(wide_step)(*with_values(wide_args, args))[1]
        finally:
            keras.config.set_dtype_policy("float32")
        exact = [np.asarray(x) for x in exact]
    assert all(x.dtype == np.float64 for x in exact)
    assert distance(rewritten, exact) <= 2 * distance(plain, exact)
    keras.backend.clear_session()


def with_values(wide: Any, values: Any) -> Any:
    """The same numbers in the dtypes of the wide arguments."""
    return jax.tree.map(lambda w, v: jax.numpy.asarray(np.asarray(v), w.dtype), wide, values)
