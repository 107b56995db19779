"""Saved on eight devices, loaded on four, three, two and one: the same bits, where they belong."""

import os
import subprocess
import sys

import pytest

from tests import fork_server

PROGRAM = """
import sys, warnings, jax, jax.numpy as jnp, optax, functrain as ft
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P
from tests.conftest import digest

directory, devices = sys.argv[1], int(sys.argv[2])
jax.config.update("jax_num_cpu_devices", devices)
assert jax.device_count() == devices
mesh = jax.make_mesh((devices,), ("data",), axis_types=(AxisType.Auto,))
tx = optax.adam(1e-3)

def create(key):
    params = {
        "w": jax.random.normal(key, (24, 40)),
        "half": jax.random.normal(key, (48,), jnp.bfloat16),
        "bias": jax.random.normal(key, (5,)),
    }
    return ft.TrainState.create(params=params, tx=tx, rng=key)

def place(x):
    divided = x.ndim and x.shape[0] % 24 == 0
    return NamedSharding(mesh, P("data") if divided else P())

shapes = jax.eval_shape(create, jax.random.key(0))
shardings = jax.tree.map(place, shapes)
if devices == 8:
    state = jax.jit(create, out_shardings=shardings)(jax.random.key(0))
    state = state.replace(opt_state=jax.tree.map(lambda x: x + 1, state.opt_state))
    ft.Checkpointer(directory).save(state, 7)
    ft.save(directory + "/alone", state)
else:
    like = jax.tree.map(
        lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s), shapes, shardings
    )
    found = ft.Checkpointer(directory).restore(like)
    state = found.state
    assert digest(ft.load(directory + "/alone", like)) == digest(state)
    assert found.position.step == 7
assert len(state.params["w"].addressable_shards) == devices
assert state.params["w"].addressable_shards[0].data.shape == (24 // devices, 40)
same = jax.tree.map(lambda x, s: x.sharding.is_equivalent_to(s, x.ndim), state, shardings)
assert jax.tree.all(same)
print(digest(state))
"""


def begin(directory: object, devices: int) -> subprocess.Popen[str]:
    environment = {name: value for name, value in os.environ.items() if name != "XLA_FLAGS"}
    return fork_server.Popen(
        [sys.executable, "-c", PROGRAM, str(directory), str(devices)],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def digest_in(process: subprocess.Popen[str]) -> str:
    out, err = process.communicate(timeout=300)
    assert process.returncode == 0, err[-2000:]
    return out.strip()


@pytest.mark.parametrize("fewer", [(3,), pytest.param((4, 2, 1), marks=pytest.mark.long)])
def test_eight_devices_to_fewer_keep_every_bit(tmp_path, fewer) -> None:
    expected = digest_in(begin(tmp_path, 8))
    assert len(expected) == 64
    loads = [begin(tmp_path, devices) for devices in fewer]
    assert [digest_in(load) for load in loads] == [expected] * len(fewer)
