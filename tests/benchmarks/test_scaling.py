"""The page's large models, placed by our rules: shapes alone, nothing is allocated."""

import math
import pathlib

import jax
import optax
import pytest
from jax.sharding import AbstractMesh

import functrain as ft
from benchmarks import scaling

PAGE = pathlib.Path(__file__).parents[2] / "docs" / "devices.md"
# By hand: d = 4096 and 8192; four or fewer matrices of attention, three of the layer's own network.
MATRICES = {
    "7B": 32 * (4 * 4096**2 + 3 * 4096 * 11_008),
    "70B": 80 * (2 * 8192**2 + 2 * 8192 * 1024 + 3 * 8192 * 28_672),
}
REST = {"7B": 2 * 32_000 * 4096 + 32 * 2 * 4096, "70B": 2 * 32_000 * 8192 + 80 * 2 * 8192}


@pytest.mark.parametrize("way", scaling.WAYS)
@pytest.mark.parametrize("devices", [64, 512])
@pytest.mark.parametrize("name", scaling.SIZES)
def test_each_device_holds_its_part_of_params_and_moments(
    name: str, devices: int, way: str
) -> None:
    parts, rule = scaling.WAYS[way]
    mesh = AbstractMesh((devices // parts, parts), ("data", "model"))
    params, tx = scaling.params, optax.adam(1e-4)
    state = jax.eval_shape(lambda: ft.TrainState.create(params=params(scaling.SIZES[name]), tx=tx))
    where = ft.sharding.shardings(state, mesh, rule)
    held = sum(
        math.prod(s.shard_shape(x.shape)) * x.dtype.itemsize
        for x, s in zip(*map(jax.tree.leaves, (state, where)), strict=True)
    )
    three_times = 3 * 4 * (MATRICES[name] / devices + REST[name] / (devices / parts))
    counts = 2 * 4  # the state's step, and Adam's
    assert held == three_times + counts
    (row,) = [
        line
        for line in PAGE.read_text().splitlines()
        if line.startswith(f"| {name} (") and f"| {devices} | {way} |" in line
    ]
    assert f"| {devices} | {way} | {held / 2**30:.2f} |" in row
