"""A traced step is told kernel by kernel. Nothing here looks at a clock."""

from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax import lax

from benchmarks.kernels import Kernel, kernels, starts, table

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


def test_the_host_starts_what_a_loop_contains_in_each_round_and_a_graph_once() -> None:
    listing = """\
001: kCopy         [source       | next=002 (3)] MemcpyDeviceToDeviceCmd
002: kWhile        [prev=001 (1) | sink        ]
condition:
    003: kCustomKernel [source | sink] loop_compare_fusion
  body:
    004: kKernel        [source       | sink        ] kernel=add
    000: kCommandBuffer [prev=004 (1) | sink        ]
        005: kKernel       [source       | next=006 (1)] kernel=gemm
        006: kCustomKernel [prev=005 (1) | sink        ] loop_add_fusion
"""
    assert starts(listing, 8) == (1, 2 + 1 / 8)
    in_a_graph = "000: kCommandBuffer [source | sink]\n    001: kWhile [source | sink]\n"
    assert starts(in_a_graph + "      body:\n        002: kKernel [source | sink]\n", 8) == (
        1,
        1 / 8,
    )
