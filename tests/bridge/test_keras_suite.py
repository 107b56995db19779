"""Keras's own trainer tests pass with fit, evaluate and predict sent through the bridge.

They come from the installed package. What fails under plain Keras (for want of TensorFlow, torch
or grain) is not asked of the bridge either.
"""

import os
import pathlib
import subprocess
import sys

import keras
import pytest

HERE = pathlib.Path(__file__).parent
SUITE = pathlib.Path(keras.__file__).parent / "src" / "trainers" / "trainer_test.py"


def passed(folder: pathlib.Path, *options: str) -> set[str]:
    """Runs the suite in a process of its own; returns the names of the tests that passed."""
    path = os.pathsep.join([str(HERE), str(HERE.parents[1]), *sys.path])
    command = [sys.executable, "-m", "pytest", str(SUITE), "-q", "-rA", "--tb=no", "-W", "ignore"]
    result = subprocess.run(
        [*command, "-p", "no:cacheprovider", f"--rootdir={folder}", *options],
        cwd=folder,
        env={**os.environ, "KERAS_BACKEND": "jax", "PYTHONPATH": path},
        capture_output=True,
        text=True,
        check=False,
    )
    lines = result.stdout.splitlines()
    return {line.split("::")[-1] for line in lines if line.startswith("PASSED")}


@pytest.mark.long
@pytest.mark.skipif(not SUITE.exists(), reason="this build of Keras came without its tests")
def test_every_trainer_test_that_passes_with_keras_passes_with_the_bridge(
    tmp_path: pathlib.Path,
) -> None:
    pytest.importorskip("absl", reason="Keras's tests need absl-py")
    plain = passed(tmp_path)
    assert len(plain) > 100
    assert sorted(plain - passed(tmp_path, "-p", "keras_suite_plugin")) == []
