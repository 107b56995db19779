"""Two processes with one mesh: what differs is refused in words, without its numbers."""

import json
import os
import socket
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np

import functrain as ft
from tests import fork_server

PROGRAM = """
import json, sys, jax, jax.numpy as jnp, numpy as np, functrain as ft

rank, port, other = int(sys.argv[1]), sys.argv[2], sys.argv[3]
jax.config.update("jax_cpu_collectives_implementation", "gloo")
address = f"127.0.0.1:{port}"
jax.distributed.initialize(address, 2, rank, coordinator_bind_address=address)
mesh = jax.make_mesh((2,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
data = np.arange(16, dtype=np.float32) + (rank if other == "data" else 0)

def step(total, batch):
    return total + jnp.sum(batch) * (1 + rank if other == "code" else 1), {}

if other == "members":
    divided, everywhere = (jax.NamedSharding(mesh, jax.P(*axes)) for axes in (["data"], []))
    members = jax.device_put(ft.population.stack([jnp.zeros(()), jnp.ones(())]), divided)
    over_all = ft.population.step(lambda x, batch: (x + 1, {"x": x}))
    first, *_ = ft.run(members, over_all, ft.NoData(2), sharding=everywhere)
    print(first.latest()["x"].tolist())
    sys.exit()
if other == "keys":
    def make():
        keys = {"one": jax.random.key(3), "four": jax.random.split(jax.random.key(4), 4)}
        return {"total": jnp.zeros(()), "keys": keys}

    def draw(state, batch):
        now, one = jax.random.split(state["keys"]["one"])
        drawn = jax.random.uniform(now) + jax.vmap(jax.random.uniform)(state["keys"]["four"]).sum()
        total = state["total"] + drawn * jnp.sum(batch)
        return {"total": total, "keys": {**state["keys"], "one": one}}, {}

    by_rule = ft.sharding.fsdp(min_size=1)
    put, created = ft.sharding.put(make(), mesh, by_rule), ft.sharding.create(make, mesh, by_rule)
    found = []
    for state in (make(), put, created):
        state, _ = ft.fit(state, draw, ft.ArrayLoader(data, 4), sharding=mesh, epochs=2, verbose=0)
        keys = state["keys"]
        found.append([float(state["total"]), jax.random.key_data(keys["one"]).tolist()])
        found[-1].append([str(keys["four"].dtype), str(keys["four"].sharding.spec)])
    print(json.dumps(found))
    sys.exit()
try:
    fuse = 2 if other == "fuse" and rank else "auto"
    loader = ft.ArrayLoader(data, 4)
    state, _ = ft.fit(jnp.zeros(()), step, loader, sharding=mesh, fuse=fuse, verbose=0)
    print(float(state))
except ValueError as error:
    print(" ".join(str(error).split())[:90])
"""


def run_both(other: str) -> list[str]:
    one_device = {name: value for name, value in os.environ.items() if name != "XLA_FLAGS"}
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    both = [
        fork_server.Popen(
            [sys.executable, "-c", PROGRAM, str(rank), port, other],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=one_device,
        )
        for rank in range(2)
    ]
    done = [process.communicate(timeout=120) for process in both]
    assert all(out for out, _ in done), [err[-2000:] for _, err in done]
    return [out.splitlines()[-1] for out, _ in done]


def test_the_same_batches_everywhere_are_divided_over_the_processes() -> None:
    assert run_both("nothing") == ["120.0", "120.0"]


def test_the_latest_logs_of_members_divided_over_the_processes_are_those_of_all() -> None:
    assert run_both("members") == ["[1.0, 2.0]"] * 2


def test_batches_of_each_process_its_own_are_refused_in_words() -> None:
    for said in run_both("data"):
        assert said.startswith("data: expected the same batches in every process")


def test_another_program_in_one_of_them_is_refused_in_both() -> None:
    for said in run_both("code"):
        assert said.startswith("step: expected the same program in every process, got digest")


def test_another_number_of_steps_to_a_program_is_refused_in_both() -> None:
    for said in run_both("fuse"):
        assert "got fuse: 'auto' in process 0, 2 in process 1" in said


def test_a_state_with_keys_is_put_and_trained_where_its_shardings_say() -> None:
    first, second = (json.loads(said) for said in run_both("keys"))
    assert first == second

    def draw(state, batch):
        key, four, total = state
        now, one = jax.random.split(key)
        drawn = jax.random.uniform(now) + jax.vmap(jax.random.uniform)(four).sum()
        return (one, four, total + drawn * jnp.sum(batch)), {}

    loader = ft.ArrayLoader(np.arange(16, dtype=np.float32), 4)
    alone = (jax.random.key(3), jax.random.split(jax.random.key(4), 4), jnp.zeros(()))
    (one, _, total), _ = ft.fit(alone, draw, loader, epochs=2, verbose=0)
    for found, spec in zip(first, ["P(None,)", "P('data',)", "P('data',)"], strict=True):
        np.testing.assert_allclose(found[0], float(total), rtol=1e-6)
        assert found[1] == jax.random.key_data(one).tolist()
        assert found[2] == ["key<fry>", spec]
