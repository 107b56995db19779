"""The benchmark measures equal work, and says what it found. Nothing here looks at a clock."""

import json
import os
import pathlib
import socket
import subprocess
import sys

import pytest

import functrain
from benchmarks.driver import Measured, _next
from benchmarks.ways import HAS_TORCH
from benchmarks.worker import Line

ROOT = pathlib.Path(__file__).parents[2]
STEPS = 8


def bench(
    folder: pathlib.Path, workload: str, ways: str, *arguments: str, module: str = "benchmarks"
) -> dict:
    command = [sys.executable, "-m", module, "--workloads", workload, "--ways", ways]
    small = ["--rounds", "1", "--steps", str(STEPS), "--output", str(folder)]
    done = subprocess.run(
        [*command, *small, *arguments],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    (path,) = folder.glob("*.json")
    return json.loads(path.read_text())


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    folder = tmp_path_factory.mktemp("bench")
    return bench(folder, "digits-mlp", "functrain-fit,keras-fit,jit-loop") | {"folder": folder}


def test_results_tell_the_machine_the_versions_and_every_way(results) -> None:
    assert results["date"]
    assert results["functrain"] == functrain.__version__
    assert set(results["machine"]) == {"cpu", "cores", "system", "python"}
    assert set(results["versions"]["jax"]) == {"keras", "jax", "numpy"}
    (result,) = results["results"]
    assert (result["workload"], result["batch"], result["steps"]) == ("digits-mlp", 32, STEPS)
    assert set(result["ways"]) == {"functrain-fit", "keras-fit", "jit-loop"}
    for way in result["ways"].values():
        assert way["error"] == ""
        assert len(way["seconds"]) == 1
        assert len(way["losses"]) == 2
        assert way["peak_bytes"] > 0


def test_a_table_and_a_picture_are_written(results) -> None:
    assert "| digits-mlp (32) |" in (results["folder"] / "results.md").read_text()
    assert (results["folder"] / "results.png").read_bytes().startswith(b"\x89PNG")


def test_a_worker_that_was_killed_is_dropped_with_its_reason() -> None:
    ours, theirs = socket.socketpair()
    lines, results = {"way": Line(ours)}, {"way": Measured()}
    theirs.close()
    assert _next(lines, "way", results, run=True) == {}
    assert lines == {}
    assert "died" in results["way"].error


def test_all_ways_do_equal_work(results) -> None:
    ways = results["results"][0]["ways"]
    expected = ways["jit-loop"]["losses"]
    for way in ways.values():
        assert way["losses"] == pytest.approx(expected, abs=1e-5)


@pytest.mark.long
@pytest.mark.parametrize("workload", ["digits-mlp", "mnist-convnet", "lstm", "transformer"])
def test_all_ways_of_the_small_nets_do_equal_work(workload, tmp_path) -> None:
    from benchmarks.ways import WAYS
    from benchmarks.workloads import WORKLOADS

    can = [w.name for w in WAYS.values() if w.environment == "jax" and w.can(WORKLOADS[workload])]
    (result,) = bench(tmp_path, workload, ",".join(can))["results"]
    first = result["ways"]["jit-loop"]["losses"][0]
    for way in result["ways"].values():  # one call only: rounding grows from step to step
        assert way["losses"][0] == pytest.approx(first, rel=1e-4)


@pytest.mark.adapters
@pytest.mark.parametrize("workload", sorted({*HAS_TORCH} - {"dcgan"}))
def test_plain_pytorch_does_equal_work(workload, tmp_path) -> None:
    pytest.importorskip("torch")
    ways = ["torch-eager", "keras-fit@torch"]
    if workload == "digits-mlp":  # compiling takes long
        ways.append("torch-compile")
    arguments = ["--python", f"torch={sys.executable}", "--steps", "1"]
    (result,) = bench(tmp_path, workload, ",".join(ways), *arguments)["results"]
    losses = [way["losses"][0] for way in result["ways"].values()]
    assert losses == pytest.approx([losses[0]] * len(ways), rel=1e-4)


@pytest.mark.adapters
def test_the_dcgan_of_pytorch_has_the_losses_of_the_example(tmp_path) -> None:
    pytest.importorskip("torch")
    arguments = ["--python", f"torch={sys.executable}", "--steps", "1"]
    (result,) = bench(tmp_path, "dcgan", "torch-eager,jit-loop", *arguments)["results"]
    ours, theirs = (result["ways"][way]["losses"][0] for way in ("jit-loop", "torch-eager"))
    assert theirs == pytest.approx(ours, rel=0.02)  # other random numbers


@pytest.mark.long
@pytest.mark.parametrize("workload", ["digits-mlp", "mnist-convnet", "lstm", "transformer"])
def test_all_ways_predict_the_same(workload, tmp_path) -> None:
    from benchmarks.ways import PREDICTING

    ways = ",".join(way.name for way in PREDICTING.values() if way.environment == "jax")
    (result,) = bench(tmp_path, workload, ways, module="benchmarks.predict")["results"]
    first = result["ways"]["jit-predict"]["losses"][0]
    for way in result["ways"].values():
        assert way["losses"] == pytest.approx([first, first], rel=1e-5)


@pytest.mark.long
def test_first_steps_are_taken_by_all_ways_in_processes_of_their_own() -> None:
    from benchmarks.first_step import TRAIN, measured

    found = measured("digits-mlp", rounds=1)
    assert set(found) == {(way, cache) for way in TRAIN for cache in (False, True)}
    for (times,) in found.values():
        *parts, whole = times
        assert min(parts) > 0
        assert sum(parts) <= whole


def test_a_way_that_fails_is_reported_and_the_others_go_on(tmp_path) -> None:
    from benchmarks.driver import Backends, measure
    from benchmarks.ways import WAYS, Way
    from benchmarks.workloads import WORKLOADS

    broken = Way("nowhere", "benchmarks.nowhere:way", "")
    with Backends({"jax": sys.executable}) as backends:
        measured = measure(
            backends,
            WORKLOADS["digits-mlp"],
            [broken, WAYS["jit-loop"]],
            rounds=1,
            steps=STEPS,
            say=lambda text: None,
        )
    assert measured["nowhere"].error == "KeyError: 'nowhere'"
    assert measured["jit-loop"].error == ""


@pytest.mark.parametrize(
    ("option", "known"), [("--workloads", "digits-mlp, mnist-mlp"), ("--ways", "keras-fit")]
)
def test_an_unknown_name_is_refused_with_those_known(option, known, capsys) -> None:
    from benchmarks.__main__ import parse

    with pytest.raises(SystemExit):
        parse([option, "nonsense"])
    (error,) = capsys.readouterr().err.splitlines()[-1:]
    assert known in error
    assert error.endswith("got nonsense")
