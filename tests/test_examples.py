"""Every example runs on a small setting."""

import pathlib
import subprocess
import sys

import pytest

EXAMPLES = pathlib.Path(__file__).parents[1] / "examples"


def run(*arguments: object) -> str:
    command = [sys.executable, *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.smoke
def test_mnist_trains_and_plain_keras_agrees(tmp_path) -> None:
    output = run(EXAMPLES / "mnist.py", "--quick", "--output", tmp_path)
    ours, theirs = (line for line in output.splitlines() if line.startswith("test accuracy"))
    assert ours.split()[2] == theirs.split()[2]
    assert float(ours.split()[2]) > 0.8
    assert (tmp_path / "mnist.keras").exists()
    assert (tmp_path / "curves.png").exists()


def test_customize_fit_runs() -> None:
    assert run(EXAMPLES / "customize_fit.py", "--quick")


@pytest.mark.long
def test_mnist_in_full_reaches_its_accuracy(tmp_path) -> None:
    output = run(EXAMPLES / "mnist.py", "--output", tmp_path)
    accuracies = [float(li.split()[2]) for li in output.splitlines() if "test accuracy" in li]
    assert len(accuracies) == 2
    assert accuracies[0] == accuracies[1] >= 0.975


@pytest.mark.parametrize("script", sorted(p.name for p in EXAMPLES.glob("*.py")))
def test_every_example_explains_itself(script) -> None:
    assert "usage:" in run(EXAMPLES / script, "--help")
