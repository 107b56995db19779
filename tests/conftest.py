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

import contextlib
import ctypes
import gc
import hashlib
import importlib.util
import json
import pathlib
import signal
from collections.abc import Generator
from typing import Any

import jax
import numpy as np
import pytest

from tests import fork_server


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


# --- what takes long -----------------------------------------------------------------------------

DURATIONS = pathlib.Path(__file__).with_name("durations.json")  # what `make durations` measured
SLOW_FROM, VERY_SLOW_FROM = 0.5, 10.0  # seconds of processor time
COMPILERS = {"tpu": "libtpu", "cuda": "jax_plugins.xla_cuda12"}  # of the tests with these marks
BEGAN = pytest.StashKey[float]()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--measure", action="store_true", help=f"update {DURATIONS.name}")


def pytest_configure(config: pytest.Config) -> None:
    if config.getoption("--measure") and not hasattr(config, "workerinput"):
        config.pluginmanager.register(Durations())


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Marks what takes seconds: `make test` leaves it to `make test-slow`.

    The slowest come first, so that no worker waits for another one's at the end. A test that is
    not in the file counts as quick, and an entry without a test as nothing. Tests that need a
    compiler for accelerators are skipped without it.
    """
    durations = json.loads(DURATIONS.read_text())
    items.sort(key=lambda item: durations.get(item.nodeid, 0) < VERY_SLOW_FROM)
    for item in items:
        if durations.get(item.nodeid, 0) >= SLOW_FROM:
            item.add_marker(pytest.mark.slow)
    for mark, module in COMPILERS.items():
        skip = pytest.mark.skipif(not is_installed(module), reason=f"needs {module}")
        for item in items:
            if item.get_closest_marker(mark):
                item.add_marker(skip)


@contextlib.contextmanager
def compilation_cache(directory: str | pathlib.Path) -> Generator[None]:
    """Enables jax's compilation cache in a directory until the block ends."""
    from jax.experimental.compilation_cache.compilation_cache import reset_cache

    import functrain

    names = [
        "jax_compilation_cache_dir",
        "jax_persistent_cache_min_compile_time_secs",
        "jax_persistent_cache_min_entry_size_bytes",
    ]
    before = {name: getattr(jax.config, name) for name in names}
    functrain.enable_compilation_cache(directory)
    try:
        yield
    finally:
        for name, value in before.items():
            jax.config.update(name, value)
        reset_cache()


def is_installed(module: str) -> bool:
    """Returns True if a module can be imported; nothing is imported but its package."""
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:
        return False


def processor_seconds() -> float:
    """Returns those of this process and of the processes that it has waited for."""
    times = os.times()
    return sum(times[:4]) + sum(fork_server.processor_seconds)


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item) -> None:
    item.stash[BEGAN] = processor_seconds()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    if call.when == "teardown":
        report.user_properties.append(("seconds", processor_seconds() - item.stash[BEGAN]))
    return report


class Durations:
    """Writes down how long the tests took that ran, and leaves what is written of the others."""

    def __init__(self) -> None:
        self.durations: dict[str, float] = json.loads(DURATIONS.read_text())

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        for name, seconds in report.user_properties:
            if name == "seconds":
                self.durations[report.nodeid] = round(float(seconds), 1)

    def pytest_sessionfinish(self) -> None:
        recorded = {k: v for k, v in sorted(self.durations.items()) if v >= SLOW_FROM}
        DURATIONS.write_text(json.dumps(recorded, indent=0) + "\n")


# -------------------------------------------------------------------------------------------------


def pytest_collection_finish() -> None:
    """What is imported by now lives on: nobody need look through it for garbage again."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(50_000, 20, 20)


def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> None:
    if nextitem is None or nextitem.path != item.path:
        drop_programs()
        return_free_memory()


def drop_programs() -> None:
    """Drops compiled programs while XLA can still map new ones: Linux allows 65,530 mappings."""
    mappings = pathlib.Path("/proc/self/maps")
    if mappings.exists() and mappings.read_bytes().count(b"\n") > 30_000:
        jax.clear_caches()


def return_free_memory() -> None:
    """Gives the system what was freed: glibc would keep gigabytes of it."""
    with contextlib.suppress(AttributeError):  # in other C libraries
        ctypes.CDLL(None).malloc_trim(0)


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
