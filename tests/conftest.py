"""Two CPU devices, Keras on JAX: set before either is imported."""

import os

os.environ["KERAS_BACKEND"] = "jax"
os.environ["XLA_FLAGS"] = (
    os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=2"
).strip()

import hashlib
import signal
from typing import Any

import jax
import numpy as np
import pytest


def digest(tree: Any) -> str:
    """A hash of every bit of a tree: paths, dtypes, shapes, values."""
    sha = hashlib.sha256()
    for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
        if jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key):
            leaf = jax.random.key_data(leaf)
        x = np.asarray(leaf)
        sha.update(f"{jax.tree_util.keystr(path)} {x.dtype} {x.shape}".encode())
        sha.update(x.tobytes())
    return sha.hexdigest()


@pytest.fixture
def strict_promotion():
    """Our own functions never rely on implicit dtype promotion."""
    with jax.numpy_dtype_promotion("strict"):
        yield


@pytest.fixture
def ctrl_c():
    """Python's own handling of Ctrl-C; a shell switches it off for what runs in the background."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)
