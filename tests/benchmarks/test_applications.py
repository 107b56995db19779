"""Every architecture, rewritten, computes what it did: keras.applications, layers, keras-hub."""

from collections.abc import Iterator
from typing import Any

import jax
import keras
import numpy as np
import pytest

import functrain as ft
from benchmarks.applications import compare, distance, head, step_of
from benchmarks.architectures import APPLICATIONS, LAYERS, around
from tests.conftest import return_free_memory

# Both programs round, each in its own order; and a move of the weights by their last place moves
# the gradients by no less than one of them.
TIMES_ROUNDING = 4


@pytest.fixture(autouse=True)
def free_memory() -> Iterator[None]:
    """Drops the programs of a test, which hold its weights: those of all models take 25 GB."""
    yield
    keras.backend.clear_session()
    jax.clear_caches()
    return_free_memory()


@pytest.mark.long
@pytest.mark.parametrize("name", [*APPLICATIONS, *LAYERS])
def test_a_rewritten_step_differs_by_rounding_only(name: str) -> None:
    made = compare(name, (APPLICATIONS | LAYERS)[name], rounds=0)
    assert made.difference <= TIMES_ROUNDING * made.rounding


@pytest.mark.long
@pytest.mark.parametrize("name", ["MobileNetV2", "ResNet50", "ConvNeXtTiny"])  # no dropout
def test_a_rewritten_step_is_as_accurate_as_it_was(name: str) -> None:
    """By the median of nine batches, because rounding may move the input of a ReLU across 0.

    The gradients of such a batch are up to a thousand times further from the exact ones, whether
    the step is rewritten or not.
    """
    step, args = step_of(APPLICATIONS[name])
    programs = jax.jit(step), jax.jit(ft.rewrites.optimize(step))
    with jax.enable_x64(True):
        keras.config.set_dtype_policy("float64")
        try:
            wide_step, wide_args = step_of(APPLICATIONS[name])
        finally:
            keras.config.set_dtype_policy("float32")
    wide_program, errors = jax.jit(wide_step), []
    for seed in range(9):
        x = jax.numpy.asarray(APPLICATIONS[name].example(np.random.default_rng(seed)))
        batch = *args[:2], x, args[3]
        with jax.enable_x64(True):
            exact = [np.asarray(v) for v in wide_program(*with_values(wide_args, batch))[1]]
        assert all(v.dtype == np.float64 for v in exact)
        errors.append([distance(program(*batch)[1], exact) for program in programs])
    plain, rewritten = np.median(errors, axis=0)
    assert rewritten <= 2 * plain


def with_values(wide: Any, values: Any) -> Any:
    """The same numbers in the dtypes of the wide arguments."""
    return jax.tree.map(lambda w, v: jax.numpy.asarray(np.asarray(v), w.dtype), wide, values)


@pytest.mark.parametrize("fused", [False, True])
def test_a_layer_is_compared_jitted_and_if_asked_in_a_loop(fused: bool) -> None:
    made = compare("tiny", around(keras.layers.SimpleRNN(4), 2, 3, 5), rounds=1, fused=fused)
    assert made.difference <= TIMES_ROUNDING * made.rounding
    assert all(x > 0 for pair in (made.jitted, made.fused) if pair for x in pair)
    assert (made.fused is not None) == fused
    assert made.row().count("|") == head(fused).splitlines()[0].count("|")


def test_labels_are_of_the_shape_of_the_logits() -> None:
    _, args = step_of(around(keras.layers.SimpleRNN(4, return_sequences=True), 2, 3, 5))
    assert args[-1].shape == (2, 3)
