import jax
import jax.numpy as jnp
import numpy as np
import pytest

import functrain as ft
from functrain.data import _stack
from functrain.data._adapt import as_batches
from functrain.engine._plan import Plan, chunks


@pytest.mark.parametrize("dtype", [np.uint8, np.float32, np.float64, jnp.bfloat16, np.bool_])
@pytest.mark.parametrize("shape", [(), (7,), (3, 5, 2)])
def test_memory_is_aligned_and_of_the_type_asked_for(shape, dtype) -> None:
    x = _stack.empty_aligned(shape, dtype)
    assert (x.shape, x.dtype) == (shape, np.dtype(dtype))
    assert x.ctypes.data % _stack.ALIGNMENT == 0
    assert x.flags.c_contiguous


def test_copies_and_gathers_are_what_numpy_makes_with_zeros_behind_them() -> None:
    x = np.random.default_rng(0).normal(size=(6, 3)).astype(np.float32)
    rows = np.array([[4, 0], [4, 1]])
    np.testing.assert_array_equal(_stack.copy_padded(x[1:5:2], 3), [*x[1:5:2], np.zeros(3)])
    np.testing.assert_array_equal(_stack.take_padded(x, rows, 3), [*x[rows], np.zeros((2, 3))])


@pytest.mark.parametrize("shuffle", [True, False])
@pytest.mark.parametrize("as_loader", [True, False])
def test_chunks_reach_a_cpu_device_without_a_copy(as_loader, shuffle) -> None:
    loader = ft.ArrayLoader(np.ones((50, 33), np.float32), 7, shuffle=shuffle)
    batches = as_batches(loader if as_loader else list(loader.epoch(0)))
    for chunk in chunks(batches, Plan(3)):
        if chunk.k == 3:
            pointer = jax.device_put(chunk.batches).unsafe_buffer_pointer()
            assert pointer == chunk.batches.ctypes.data
