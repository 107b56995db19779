"""The cost of a step on a CPU, whose loop has no known length."""

from typing import Any

import jax.numpy as jnp

import functrain as ft


def step(state: Any, batch: Any) -> Any:
    return state + jnp.mean(batch @ batch.T), {}


def test_kernels_of_a_loop_of_unknown_length_do_not_depend_on_k() -> None:
    counts = [
        ft.inspect.cost(jnp.zeros(()), step, jnp.ones((32, 64)), fuse=k).kernels for k in (2, 8, 32)
    ]
    assert counts == [counts[0]] * 3
    assert counts[0] >= 1
