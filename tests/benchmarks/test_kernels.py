"""A traced step is told kernel by kernel. Nothing here looks at a clock."""

from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax import lax

from benchmarks.kernels import Kernel, kernels, table

W, X = jnp.eye(64), jnp.ones((32, 64))


def step(w: jax.Array, x: jax.Array) -> tuple[jax.Array, Any]:
    def cell(h: jax.Array, _: Any) -> Any:
        return jnp.tanh(h @ w), None

    h, _ = lax.scan(cell, x, None, length=5)
    return jnp.sin(w), {"loss": h.sum()}


@pytest.fixture(scope="module")
def found() -> list[Kernel]:
    return kernels(step, W, X, rounds=3)


def only(found: list[Kernel], what: str) -> Kernel:
    (kernel,) = (kernel for kernel in found if what in kernel.contents)
    return kernel


def test_a_kernel_in_a_loop_counts_as_often_as_it_runs(found: list[Kernel]) -> None:
    assert only(found, "dot").count == 5
    assert only(found, "tanh").count == 5
    assert only(found, "sine").count == 1


def test_a_kernel_is_told_with_its_result_and_its_place(found: list[Kernel]) -> None:
    kernel = only(found, "dot")
    assert kernel.result == "f32[32,64]"
    assert kernel.where.endswith("dot_general")


def test_the_table_shows_the_first_and_the_sum_of_all() -> None:
    two = [Kernel("a", 2, 3e-6, "f32[8]", "add", "x"), Kernel("b", 1, 1e-6, "f32[]", "mul", "y")]
    text = table(two, 1)
    assert "| a " in text
    assert "| b " not in text
    assert text.endswith("3 kernels in a step take 0.007 ms.")
