"""The benchmark for GPUs runs to its end where there is none. Nothing here looks at a clock."""

import argparse
import json
import os
import pathlib
import subprocess
import sys

import pytest

from benchmarks import gpu

ROOT = pathlib.Path(__file__).parents[2]
WAYS = {
    "dispatch": {"jit", "scan of 1", "fused 1", "scan of 8", "fused 8"},
    "fit": {"functrain.fit", "bridge.fit", "Keras fit", "Keras fit, steps_per_execution=32"},
    "populations": {"1 members", "32 members"},
}


@pytest.mark.slow
def test_the_parts_run_on_a_cpu_and_have_a_figure_for_each_way(tmp_path: pathlib.Path) -> None:
    command = [sys.executable, "-m", "benchmarks.gpu", "--quick", "--output", str(tmp_path)]
    done = subprocess.run(
        [*command, "--part", ",".join(["device", *WAYS, "gpt2 torch-graph"])],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    results = json.loads((tmp_path / "results.json").read_text())
    assert results["device"]["platform"] == "cpu"
    for part, ways in WAYS.items():
        for timed in results[part].values():
            assert set(timed) == ways
            assert all(len(way["rounds"]) == 2 for way in timed.values())
    assert results["gpt2 torch-graph"] == {"left out": "needs PyTorch and a GPU"}


def test_an_unknown_part_is_refused(monkeypatch, capsys) -> None:
    monkeypatch.setattr(sys, "argv", ["benchmarks.gpu", "--part", "fit,fits"])
    with pytest.raises(SystemExit):
        gpu.main()
    assert "--part: unknown fits; --list shows the names" in capsys.readouterr().err


def test_the_name_of_a_part_has_no_comma_so_that_a_list_can_contain_it() -> None:
    assert not [name for name in gpu.parts() if "," in name]


def test_a_part_that_is_stopped_keeps_what_it_measured(monkeypatch, tmp_path) -> None:
    endless = tmp_path / "python"
    endless.write_text("#!/bin/sh\necho '{\"digits-mlp\": 3}'\nprintf '{\"mnist-'\nexec sleep 60\n")
    endless.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(endless))
    part, args = gpu.parts()["fit"], argparse.Namespace(rounds=2, quick=True)
    found = gpu.in_child("fit", part, args, left=0.5)
    assert found == {"digits-mlp": 3, "error": "stopped after 0 s"}
