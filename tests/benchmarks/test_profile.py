"""The profile finds a step's operations and counts their work. Nothing here looks at a clock."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from benchmarks.operations import Operation, operations, seconds
from benchmarks.profile import profile

NO_PADDING = ((0, 0), (0, 0))
NHWC = ("NHWC", "HWIO", "NHWC")


def step(w: jax.Array, x: jax.Array) -> tuple[jax.Array, Any]:
    def loss(w: jax.Array) -> jax.Array:
        out = lax.conv_general_dilated(x, w, (1, 1), "VALID", dimension_numbers=NHWC)
        return jnp.tanh(out).sum()

    value, grad = jax.value_and_grad(loss)(w)
    return w - grad, {"loss": value}


W, X = jnp.ones((3, 3, 4, 8)), jnp.ones((4, 16, 16, 4))


def only(fn: Any, *args: jax.Array) -> Operation:
    (eqn,) = jax.make_jaxpr(fn)(*args).eqns
    return Operation(eqn, 1, "")


def test_a_step_is_taken_apart() -> None:
    found = operations(step, W, X, "auto")
    assert [(o.eqn.primitive.name, o.count) for o in found] == [
        ("conv_general_dilated", 1),
        ("reduce_sum", 1),
        ("conv_general_dilated", 1),
    ]
    assert found[2].rule  # the gradient
    assert {o.rule for o in operations(step, W, X, "off")} == {""}


def test_operations_in_loops_count_as_often_as_they_run() -> None:
    def steps(w: jax.Array, xs: jax.Array) -> Any:
        return lax.scan(step, w, xs)

    (conv, *_) = operations(steps, W, jnp.stack([X] * 5), "auto")
    assert conv.count == 5


@pytest.mark.parametrize(
    ("options", "shape", "flops"),
    [
        ({}, (3, 3, 4, 8), 2 * (4 * 14 * 14 * 8) * (3 * 3 * 4)),
        ({"feature_group_count": 4}, (3, 3, 1, 8), 2 * (4 * 14 * 14 * 8) * (3 * 3)),
        ({"lhs_dilation": (2, 2)}, (3, 3, 4, 8), 2 * (4 * 29 * 29 * 8) * (3 * 3 * 4) // 4),
    ],
)
def test_the_products_of_a_convolution_are_counted(
    options: Any, shape: tuple[int, ...], flops: int
) -> None:
    def conv(x: jax.Array, w: jax.Array) -> jax.Array:
        return lax.conv_general_dilated(x, w, (1, 1), NO_PADDING, dimension_numbers=NHWC, **options)

    assert only(conv, X, jnp.ones(shape)).flops == flops


def test_the_products_of_a_matrix_product_are_counted() -> None:
    operation = only(jnp.matmul, jnp.ones((5, 32, 16)), jnp.ones((5, 16, 8)))
    assert operation.flops == 2 * 5 * 32 * 16 * 8
    assert operation.nbytes == 4 * 5 * (32 * 16 + 16 * 8 + 32 * 8)


KINDS = {
    "keys": lambda: jax.random.bits(jax.random.key(0), (64, 128)),
    "indices": lambda: jnp.ones((64, 128))[jnp.arange(64)],
    "several outputs": lambda: lax.top_k(jnp.ones((64, 128)), 3),
}


@pytest.mark.parametrize("kind", KINDS)
def test_any_kind_of_input_can_be_timed(kind: str) -> None:
    found = operations(lambda state, batch: (state, KINDS[kind]()), 0.0, 0.0, "auto")
    assert found
    for operation in found:
        assert seconds(operation, "auto") > 0


def test_the_profile_of_ones_own_step_is_a_table() -> None:
    made = profile(step, W, X)
    np.testing.assert_array_equal(W, jnp.ones_like(W))  # alive
    lines = str(made).splitlines()
    assert sum("conv_general_dilated f32" in line for line in lines) == 2
    assert f"its {len(made.times)} kinds of operations" in lines[-1]
    whole = [t * o.count for t, o in zip(made.times, made.operations, strict=True)]
    assert whole == sorted(whole, reverse=True)
