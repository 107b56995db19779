"""Sums of attention's scores as products with ones."""

import importlib
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax import lax

from functrain.inspect import explain_rewrites
from functrain.rewrites import optimize
from functrain.rewrites._equations import walk_equations
from functrain.rewrites.row_sum import MAX_WEIGHTED, MIN_ELEMENTS, MIN_LENGTH, row_sum

from . import cases

ANY_SIZE = mock.patch.multiple(
    importlib.import_module("functrain.rewrites.row_sum"), MIN_LENGTH=1, MIN_ELEMENTS=0
)


def attention(causal: bool) -> Any:
    def fn(q: Any, k: Any, v: Any, g: Any) -> Any:
        attend = lambda *qkv: jax.nn.dot_product_attention(*qkv, is_causal=causal)  # noqa: E731
        out, pull = jax.vjp(attend, q, k, v)
        return out, *pull(g)

    return fn


def operands(*shape: int, dtype: Any = jnp.float32) -> list[jax.Array]:
    rng = np.random.default_rng(0)
    return [cases.normal(rng, shape, dtype) for _ in range(4)]


@pytest.mark.parametrize("causal", [False, True])
def test_attention_and_its_gradients_are_as_accurate_as_they_were(causal: bool) -> None:
    with ANY_SIZE:
        cases.check_accuracy(attention(causal), operands(2, 12, 3, 4), row_sum)


@cases.drawn(6)
@given(shape=st.lists(st.integers(1, 5), min_size=3, max_size=4), length=st.integers(1, 300))
def test_a_sum_is_as_accurate_as_it_was(shape: list[int], length: int) -> None:
    x = cases.normal(np.random.default_rng(0), (*shape, length)) * 1e3
    with ANY_SIZE:
        cases.check_accuracy(lambda x: jnp.sum(x, -1), [x], row_sum)


def test_no_sum_over_scores_is_left() -> None:
    with ANY_SIZE:
        after = cases.rewritten(attention(True), operands(2, 12, 3, 4), row_sum)
    sums = [eqn for eqn, *_ in walk_equations(after) if eqn.primitive.name == "reduce_sum"]
    assert not any(row_sum.applies(eqn) for eqn in sums)
    assert "dot_general" in cases.kinds(after)


def test_nan_and_inf_pass_through_alike() -> None:
    x = np.ones((4, 1, 1, 10), np.float32)
    x[0, ..., 3], x[1, ..., 4], x[2, ..., 5:7] = np.nan, np.inf, (np.inf, -np.inf)
    with ANY_SIZE:
        got = jax.jit(optimize(lambda x: jnp.sum(x, -1)))(x)
    np.testing.assert_array_equal(got[:, 0, 0], [np.nan, np.inf, np.nan, 10])


def test_the_sizes_and_types_decide() -> None:
    def taken(*shape: int, axis: int = -1, dtype: Any = jnp.float32) -> bool:
        x = jax.ShapeDtypeStruct(shape, dtype)
        return cases.takes(row_sum, lambda x: lax.reduce_sum(x, [axis % x.ndim]), x) == [True]

    assert taken(2, 4, 32, MIN_ELEMENTS // 256)
    assert taken(1, 2, 4, 32, MIN_ELEMENTS // 256)
    assert not taken(2, 4, 31, MIN_ELEMENTS // 256)
    assert not taken(8, 32, MIN_ELEMENTS // 256)
    assert not taken(2, 4, 32, MIN_ELEMENTS // 256, axis=2)
    assert not taken(64, 4, 32, MIN_LENGTH - 1)
    assert not taken(2, 4, 32, 32, dtype=jnp.int32)
    assert not taken(2, 4, 32, 32, dtype=jnp.bfloat16)


def test_a_long_sum_of_rows_times_one_row_is_left() -> None:
    def taken(other: tuple[int, ...], rows: int) -> bool:
        x, y = (jax.ShapeDtypeStruct(s, jnp.float32) for s in ((2, rows, 8, 128), other))
        shown = explain_rewrites(lambda x, y: jnp.sum(x * y, -1), x, y)
        return "row_sum" in {row.rule for row in shown.rows}

    many = MAX_WEIGHTED // (2 * 8 * 128)
    assert not taken((128,), many)
    assert taken((128,), many - 1)
    assert taken((2, many, 8, 128), many)
    assert taken((), many)


def test_only_auto_takes_it() -> None:
    def rules(mode: Any) -> set[str]:
        shown = explain_rewrites(attention(True), *operands(2, 64, 4, 4), rewrites=mode)
        return {row.rule for row in shown.rows}

    assert "row_sum" in rules("auto")
    assert "row_sum" not in rules("exact")


def test_it_goes_on_inside_shard_map() -> None:
    with ANY_SIZE:
        cases.check_shard_map(attention(False), operands(2, 12, 3, 4))


def test_a_scan_of_steps_does_not_depend_on_its_length() -> None:
    def attend(x: Any, w: Any) -> Any:
        return jax.nn.dot_product_attention(x, x * w, x, is_causal=True)

    x, w, *_ = operands(2, 12, 3, 4)
    with ANY_SIZE:
        cases.check_chunks(attend, x, w)
