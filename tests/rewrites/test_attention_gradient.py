"""Gradients of attention's keys, in the other order."""

import importlib
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from functrain.inspect import explain_rewrites
from functrain.rewrites.attention_gradient import MIN_ELEMENTS, attention_gradient

from . import cases

ANY_SIZE = mock.patch.multiple(
    importlib.import_module("functrain.rewrites.attention_gradient"), MIN_ELEMENTS=0
)
# The axes of scores and of queries, and of those what is summed over, and what is batch.
PRODUCTS = {
    "keys": ("bnts", "btnh", "bnsh"),
    "with an axis of one": ("bntos", "btnoh", "bnsoh"),
    "two sums": ("btuns", "btunh", "bnsh"),
    "the batch in the middle": ("tsbn", "tbnh", "bnsh"),
    "several axes left": ("btsrn", "btnhi", "bnsrhi"),
}
SIZES = {"b": 2, "n": 3, "t": 6, "s": 6, "h": 2, "o": 1, "u": 2, "r": 2, "i": 2}


def product(name: str, dtype: Any = jnp.float32) -> Any:
    left, right, result = PRODUCTS[name]
    rng = np.random.default_rng(0)
    x, y = (cases.normal(rng, [SIZES[c] for c in axes], dtype) for axes in (left, right))
    batch = [c for c in left if c in right and c in result]
    over = [c for c in left if c in right and c not in result]
    numbers = (
        ([left.index(c) for c in over], [right.index(c) for c in over]),
        ([left.index(c) for c in batch], [right.index(c) for c in batch]),
    )
    return lambda x, y: lax.dot_general(x, y, numbers), x, y


def attention(q: Any, k: Any, v: Any) -> Any:
    return jax.grad(lambda *qkv: jnp.sum(jax.nn.dot_product_attention(*qkv) ** 2), (0, 1, 2))(
        q, k, v
    )


def operands(*shape: int) -> list[jax.Array]:
    rng = np.random.default_rng(0)
    return [cases.normal(rng, shape) for _ in range(3)]


@pytest.mark.parametrize("name", PRODUCTS)
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_a_product_is_as_accurate_as_it_was(name: str, dtype: str) -> None:
    with ANY_SIZE, jax.enable_x64(dtype == "float64"):
        fn, x, y = product(name, dtype)
        cases.check_accuracy(fn, (x, y), attention_gradient)


def test_attentions_gradients_are_as_accurate_as_they_were() -> None:
    with ANY_SIZE:
        cases.check_accuracy(attention, operands(2, 12, 3, 4), attention_gradient)


def test_each_operand_keeps_its_precision() -> None:
    x, y = jnp.ones((2, 6, 6)), jnp.ones((2, 6, 3))
    mixed = (lax.Precision.DEFAULT, lax.Precision.HIGHEST)

    def fn(x: Any, y: Any) -> Any:
        return lax.dot_general(x, y, (((1,), (1,)), ((0,), (0,))), precision=mixed)

    with ANY_SIZE:
        after = cases.rewritten(fn, (x, y), attention_gradient)
    assert after.eqns[0].params["precision"] == mixed[::-1]


def test_the_sizes_and_types_decide() -> None:
    def taken(left: Any, right: Any, over: Any = (1, 1), dtype: Any = jnp.float32) -> bool:
        x, y = (jax.ShapeDtypeStruct((2, *shape), dtype) for shape in (left, right))
        numbers = (((over[0],), (over[1],)), ((0,), (0,)))
        fn = lambda x, y: lax.dot_general(x, y, numbers)  # noqa: E731
        return cases.takes(attention_gradient, fn, x, y) == [True]

    long = MIN_ELEMENTS // 2 // 64
    assert taken((64, long), (64, 16))
    assert not taken((64, long - 1), (64, 16))
    assert not taken((long, 64), (64, 16), (2, 1))  # what is summed over is last
    assert not taken((64, long), (64, long))
    assert not taken((64 * long, 1), (64 * long, 1))
    assert not taken((64, long), (64, 16), dtype=jnp.bfloat16)


def test_only_auto_takes_it() -> None:
    def rules(mode: Any) -> set[str]:
        return {
            row.rule
            for row in explain_rewrites(attention, *operands(2, 64, 4, 4), rewrites=mode).rows
        }

    assert "attention_gradient" in rules("auto")
    assert rules("exact") == {""}


def test_it_goes_on_inside_shard_map() -> None:
    with ANY_SIZE:
        cases.check_shard_map(attention, operands(2, 12, 3, 4))


def test_a_scan_of_steps_does_not_depend_on_its_length() -> None:
    def attend(x: Any, w: Any) -> Any:
        return jax.nn.dot_product_attention(x, x * w, x, is_causal=True)

    x, w, _ = operands(2, 12, 3, 4)
    with ANY_SIZE:
        cases.check_chunks(attend, x, w)
