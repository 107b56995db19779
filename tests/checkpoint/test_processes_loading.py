"""Two processes that load a model in safetensors, which is divided between them."""

import pathlib

import numpy as np
import pytest

import functrain as ft
from tests.several_processes import lines_starting, outputs, start

PROGRAM = """
import os, pathlib, sys, time, jax, jax.numpy as jnp, safetensors, functrain as ft

directory, size, shards, leaves = sys.argv[1], int(sys.argv[2]), 8, 4
status = pathlib.Path("/proc/self/status")

def mib(name):
    return int(status.read_text().split(name + ":")[1].split()[0]) / 2**10

def peak(act):
    before = mib("VmRSS")
    pathlib.Path("/proc/self/clear_refs").write_text("5")
    start = time.perf_counter()
    result = act()
    return result, (mib("VmHWM") - before) / size, time.perf_counter() - start

os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=1"
ft.distributed.initialize()
mesh = ft.sharding.mesh({"data": 2})
rows = size * 2**20 // 4 // (shards * leaves) // 1024
names = [f"layers.{i}.{j}.weight" for i in range(shards) for j in range(leaves)]
rule = ft.Rename("layers.*.*.weight", "layers_*/*/kernel", "o i -> i o")
# Half of the leaves are divided along the rows of the file, half along its columns.
def like(j):
    spec = jax.P(None, "data") if j % 2 else jax.P("data")
    return jax.ShapeDtypeStruct((1024, rows), jnp.float32, sharding=jax.NamedSharding(mesh, spec))
state = {f"layers_{i}": {str(j): {"kernel": like(j)} for j in range(leaves)} for i in range(shards)}
warm, taken, seconds = peak(lambda: ft.warm_start(state, directory, rename=[rule]))
assert warm.missing == () and len(warm.loaded) == shards * leaves

def by_library():
    parts = []
    for file in sorted(pathlib.Path(directory).glob("*.safetensors")):
        with safetensors.safe_open(file, "numpy") as arrays:
            for name in arrays.keys():
                half = slice(jax.process_index() * 512, (jax.process_index() + 1) * 512)
                part = arrays.get_slice(name)[:, half].T
                parts.append(jax.device_put(part, jax.local_devices()[0]))
    return jax.block_until_ready(parts)

total = jax.jit(lambda tree: sum(jnp.sum(x) for x in jax.tree.leaves(tree)))
value = float(total(warm.state))
del warm
_, _, theirs = peak(by_library)
print("taken", taken, seconds, theirs, value)
"""


@pytest.mark.parametrize("size", [192, pytest.param(2048, marks=pytest.mark.long)])
def test_each_process_reads_its_parts_of_a_sharded_model(tmp_path: pathlib.Path, size: int) -> None:
    leaves = size * 2**20 // 4 // 32
    arrays = {
        f"layers.{i}.{j}.weight": np.full((leaves // 1024, 1024), i + 1, np.float32)
        for i in range(8)
        for j in range(4)
    }
    ft.export.params(tmp_path / "model.safetensors", arrays, shard_bytes=size * 2**20 // 8)
    assert len(list(tmp_path.glob("*.safetensors"))) == 8
    for line in lines_starting(
        outputs(start(2, ["-c", PROGRAM], str(tmp_path), str(size))), "taken"
    ):
        taken, _, _, total = map(float, line.split()[1:])
        # In models: the half that a process has, and two leaves of it while they are transposed.
        assert taken < 0.5 + 2 / 32 + 24 / size
        assert total == sum(float(x.sum()) for x in arrays.values())
