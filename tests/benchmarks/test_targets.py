"""The benchmark of targets: its tables, its estimates, and its large models as shapes."""

import json
import math
import os
import pathlib
import subprocess
import sys

import jax
import optax
import pytest
from jax.sharding import AbstractMesh

import functrain as ft
from benchmarks import large_transformers, target_tables

ROOT = pathlib.Path(__file__).parents[2]
# By hand: d = 4096 and 8192; four or fewer matrices of attention, three of the layer's own network.
MATRICES = {
    "7B": 32 * (4 * 4096**2 + 3 * 4096 * 11_008),
    "70B": 80 * (2 * 8192**2 + 2 * 8192 * 1024 + 3 * 8192 * 28_672),
}
REST = {"7B": 2 * 32_000 * 4096 + 32 * 2 * 4096, "70B": 2 * 32_000 * 8192 + 80 * 2 * 8192}


def state_bytes(name: str, devices: int, way: str) -> int:
    """Returns the bytes of params, moments and counts on each device, by hand."""
    parts, _ = large_transformers.WAYS[way]
    parameters = MATRICES[name] / devices + REST[name] / (devices / parts)
    return int(3 * 4 * parameters) + 2 * 4


@pytest.mark.parametrize("way", large_transformers.WAYS)
@pytest.mark.parametrize("devices", [64, 256])
@pytest.mark.parametrize("name", large_transformers.SIZES)
def test_each_device_holds_its_part_of_params_and_moments(
    name: str, devices: int, way: str
) -> None:
    parts, rule = large_transformers.WAYS[way]
    mesh = AbstractMesh((devices // parts, parts), ("data", "model"))
    params, size = large_transformers.params, large_transformers.SIZES[name]
    tx = optax.adam(1e-4)
    state = jax.eval_shape(lambda: ft.TrainState.create(params=params(size), tx=tx))
    shardings = ft.sharding.shardings(state, mesh, rule)
    held = sum(
        math.prod(s.shard_shape(x.shape)) * x.dtype.itemsize
        for x, s in zip(*map(jax.tree.leaves, (state, shardings)), strict=True)
    )
    assert held == state_bytes(name, devices, way)


def test_the_stored_page_has_the_stored_results() -> None:
    folder = ROOT / "benchmarks" / "results"
    results = json.loads((folder / "targets.json").read_text())
    assert target_tables.markdown(results) == (folder / "targets.md").read_text()


def test_the_pages_state_what_each_device_holds() -> None:
    results = json.loads((ROOT / "benchmarks" / "results" / "targets.json").read_text())
    rows = [row for row in results["rows"] if row["part"] == "memory"]
    assert {row["name"] for row in rows} == {"7B", "70B"}
    for row in rows:
        devices = math.prod(map(int, row["target"].rpartition(":")[2].split("x")))
        assert row["state"] == state_bytes(row["name"], devices, row["way"])
    for table in target_tables.memory_table(rows)[-1].splitlines():
        assert table in (ROOT / "docs" / "devices.md").read_text()


@pytest.mark.tpu
def test_the_estimates_of_a_small_network_are_those_that_were_found_before(
    tmp_path: pathlib.Path,
) -> None:
    command = [sys.executable, "-m", "benchmarks.targets", "--output", str(tmp_path)]
    command += ["--targets", "tpu:v5e", "--workloads", "digits-mlp"]
    path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        command,
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    rows = json.loads((tmp_path / "targets.json").read_text())["rows"]
    cost = {row.get("way", row.get("members")): row for row in rows}
    # What the compiler said of the plain step before there were rewrites for it.
    assert cost["scan by hand"]["cycles"] == pytest.approx(25_323, rel=0.05)
    assert cost["fused 32"]["cycles"] <= 17_500
    assert cost[32]["cycles"] <= 36_000
    assert cost["fused 32"]["kernels"] <= cost["scan by hand"]["kernels"]
    assert "| digits-mlp |" in (tmp_path / "targets.md").read_text()
