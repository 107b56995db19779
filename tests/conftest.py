"""Two CPU devices, Keras on JAX, compiled programs shared: set before either is imported."""

import atexit
import os
import shutil
import tempfile

os.environ["KERAS_BACKEND"] = "jax"
os.environ["XLA_FLAGS"] = (
    os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=2"
).strip()
if "JAX_COMPILATION_CACHE_DIR" not in os.environ:  # what one process compiled serves the others
    programs = tempfile.mkdtemp(prefix="functrain-programs-")
    atexit.register(shutil.rmtree, programs, ignore_errors=True)
    os.environ["JAX_COMPILATION_CACHE_DIR"] = programs
    os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0"
    os.environ["JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES"] = "-1"

import gc
import hashlib
import pathlib
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


SLOW = pathlib.Path(__file__).with_name("slow.txt")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Marks what takes seconds: `make test` leaves it to `make test-slow`."""
    slow = set(SLOW.read_text().splitlines())
    for item in items:
        if item.nodeid in slow:
            item.add_marker(pytest.mark.slow)


def pytest_collection_finish() -> None:
    """What is imported by now lives on: nobody need look through it for garbage again."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(50_000, 20, 20)


def pytest_ignore_collect(collection_path: pathlib.Path) -> bool | None:
    """Doctests are not looked for in what the tests start in processes of their own."""
    is_script = collection_path.suffix == ".py" and not collection_path.name.startswith("test_")
    return True if is_script and collection_path.name != "__init__.py" else None


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
