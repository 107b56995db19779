"""The table of placement is what the devices hold."""

import collections
import re

import jax
import jax.numpy as jnp
import optax
import pytest
from jax.sharding import AbstractMesh
from jax.sharding import PartitionSpec as P

import functrain as ft
from functrain.common._repr import format_bytes

RULE = ft.sharding.rules({"**/kernel": P(None, "model"), "**": ft.sharding.fsdp("data")})
UNITS = {"B": 1, "KiB": 2**10, "MiB": 2**20}


def make() -> ft.TrainState:
    layer = {"kernel": jnp.zeros((64, 256)), "bias": jnp.zeros(256)}
    params = {f"block_{i}": layer for i in range(3)} | {"table": jnp.zeros((2_000, 64))}
    return ft.TrainState.create(params=params, tx=optax.adam(1e-3), rng=jax.random.key(0))


def said(text: str) -> dict[str, float]:
    """Returns how many bytes each kind of device is said to hold."""
    lines = re.findall(r"^(.*): ([\d.]+) (\w+) of", text, re.MULTILINE)
    return {who: float(number) * UNITS[unit] for who, number, unit in lines}


def test_the_bytes_of_each_device_are_those_of_its_shards() -> None:
    mesh = ft.sharding.mesh({"data": 1, "model": 2})
    state = ft.sharding.create(make, mesh, RULE).replace(rng=None)
    held: collections.Counter[jax.Device] = collections.Counter()
    for leaf in jax.tree.leaves(state):
        for shard in leaf.addressable_shards:
            held[shard.device] += shard.data.nbytes
    assert len(set(held.values())) == 1
    whole = sum(leaf.nbytes for leaf in jax.tree.leaves(state))
    last = ft.inspect.placement(state).splitlines()[-1]
    assert (
        last
        == f"each of 2 devices: {format_bytes(held[jax.devices()[0]])} of {format_bytes(whole)}"
    )


def test_what_is_planned_is_said_like_what_is_there() -> None:
    mesh = ft.sharding.mesh({"data": 1, "model": 2})
    shapes = jax.eval_shape(make)
    planned = ft.inspect.placement(shapes, ft.sharding.shardings(shapes, mesh, RULE))
    assert planned == ft.inspect.placement(ft.sharding.create(make, mesh, RULE))


def test_equal_layers_share_a_row_and_no_line_is_longer_than_80_columns() -> None:
    shapes = jax.eval_shape(make)
    shapes = {"a_long_name_of_a_model_in_a_tree_of_several": {"another_long_name": shapes}}
    mesh = AbstractMesh((4, 2), ("data", "model"))
    text = ft.inspect.placement(shapes, ft.sharding.shardings(shapes, mesh, RULE))
    assert max(map(len, text.splitlines())) <= 80
    state = jax.eval_shape(make)
    text = ft.inspect.placement(state, ft.sharding.shardings(state, mesh, RULE))
    assert text.count("  3 float32[64, 256]  -, model  ") == 3  # of the params, of Adam's moments
    assert re.search(r"params/table +float32\[2000, 64\] +data, - +500x64 +125.0 KiB", text)


def test_a_device_of_an_abstract_mesh_is_called_one() -> None:
    params = {"w": jnp.zeros(256)}
    planned = ft.sharding.shardings(params, AbstractMesh((1,), ("data",)), ft.sharding.replicated)
    assert ft.inspect.placement(params, planned).endswith("device 0: 1.0 KiB of 1.0 KiB")


def test_what_lies_on_one_device_is_told_from_what_lies_on_all() -> None:
    one, two = jax.devices()[:2]
    mesh = ft.sharding.mesh({"data": 2})
    state = {
        "all": jax.device_put(jnp.zeros(256), jax.NamedSharding(mesh, P())),
        "one": jax.device_put(jnp.zeros(256), one),
    }
    text = ft.inspect.placement(state)
    assert said(text) == {str(one): 2048, str(two): 1024}
    assert re.search(r"one +float32\[256\] +one device", text)


def test_shardings_of_another_state_are_refused() -> None:
    with pytest.raises(ValueError, match=r"mismatch|structure"):
        ft.inspect.placement({"a": jnp.zeros(3)}, {"b": None})
