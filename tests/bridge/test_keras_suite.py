"""Keras's own tests of trainers and callbacks pass with fit and the like through the bridge.

They come from the installed package. What fails for want of TensorFlow, torch or grain is not asked
of the bridge; `make test-adapters` has them.
"""

import os
import pathlib
import re
import subprocess
import sys
from xml.etree import ElementTree

import keras
import pytest

HERE = pathlib.Path(__file__).parent
SOURCE = pathlib.Path(keras.__file__).parent / "src"
SUITE = [SOURCE / "trainers" / "trainer_test.py", SOURCE / "callbacks" / "callback_test.py"]
SHARDS = 8
# It asserts that variables have no values while Keras trains; in a run of the bridge they have.
OF_KERAS_ALONE = "test_fit_eval_flow_for_jax_model_weights"
MISSING = r"No module named '(tensorflow|torch|grain)'|requires the tensorflow module"

pytestmark = pytest.mark.skipif(
    not all(map(pathlib.Path.exists, SUITE)), reason="this build of Keras came without its tests"
)


def outcomes(folder: pathlib.Path, *options: str, shard: str = "0/1") -> dict[str, str]:
    """Runs the suite in a process of its own; returns every test's name and why it failed."""
    pytest.importorskip("absl", reason="Keras's tests need absl-py")
    path = os.pathsep.join([str(HERE), str(HERE.parents[1]), *sys.path])
    report = folder / "report.xml"
    quietly = ["-q", "--tb=line", "-W", "ignore", "-p", "no:cacheprovider"]
    settings = folder / "pytest.ini"  # not this project's, which may be around the environment
    settings.write_text("[pytest]\n")
    where = [f"--rootdir={folder}", f"--config-file={settings}"]
    command = [sys.executable, "-m", "pytest", *map(str, SUITE), *quietly, *where]
    result = subprocess.run(
        [*command, f"--junit-xml={report}", *options],
        cwd=folder,
        env={**os.environ, "KERAS_BACKEND": "jax", "PYTHONPATH": path, "SUITE_SHARD": shard},
        capture_output=True,
        text=True,
        check=False,
    )
    assert report.exists(), result.stdout + result.stderr
    cases = list(ElementTree.parse(report).iter("testcase"))
    skipped = {case.get("name") for case in cases if case.find("skipped") is not None}
    skipped.add(OF_KERAS_ALONE)
    failed = {
        case.get("name"): str(found.get("message"))
        for case in cases
        for found in (case.find("failure"), case.find("error"))
        if found is not None
    }
    names = {str(case.get("name")) for case in cases if case.get("name") not in skipped}
    return {name: failed.get(name, "") for name in names}


@pytest.mark.parametrize(
    "shard", [0, *(pytest.param(i, marks=pytest.mark.long) for i in range(1, SHARDS))]
)
def test_trainer_tests_of_keras_pass_with_the_bridge(shard: int, tmp_path: pathlib.Path) -> None:
    found = outcomes(tmp_path, "-p", "keras_suite_plugin", shard=f"{shard}/{SHARDS}")
    assert sum(not why for why in found.values()) > 12
    assert {name: why for name, why in found.items() if why and not re.search(MISSING, why)} == {}


@pytest.mark.adapters
@pytest.mark.long
def test_every_trainer_test_that_passes_with_keras_passes_with_the_bridge(
    tmp_path: pathlib.Path,
) -> None:
    plain = outcomes(tmp_path)
    ours = outcomes(tmp_path, "-p", "keras_suite_plugin")
    assert ours.keys() == plain.keys()
    assert sum(not why for why in plain.values()) > 100
    assert {name: why for name, why in ours.items() if why and not plain[name]} == {}
