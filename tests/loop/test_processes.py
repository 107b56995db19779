"""Two processes with one mesh: batches that differ are refused in words, without their numbers."""

import os
import socket
import subprocess
import sys

PROGRAM = """
import sys, jax, jax.numpy as jnp, numpy as np, functrain as ft

rank, port, same = int(sys.argv[1]), sys.argv[2], sys.argv[3] == "same"
jax.config.update("jax_cpu_collectives_implementation", "gloo")
address = f"127.0.0.1:{port}"
jax.distributed.initialize(address, 2, rank, coordinator_bind_address=address)
mesh = jax.make_mesh((2,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
data = np.arange(16, dtype=np.float32) + (0 if same else rank)

def step(total, batch):
    return total + jnp.sum(batch), {}

try:
    state, _ = ft.fit(jnp.zeros(()), step, ft.ArrayLoader(data, 4), sharding=mesh, verbose=0)
    print(float(state))
except ValueError as error:
    print(str(error).splitlines()[0][:90])
"""


def run_both(same: str) -> list[str]:
    one_device = {name: value for name, value in os.environ.items() if name != "XLA_FLAGS"}
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    both = [
        subprocess.Popen(
            [sys.executable, "-c", PROGRAM, str(rank), port, same],
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
    assert run_both("same") == ["120.0", "120.0"]


def test_batches_of_each_process_its_own_are_refused_in_words() -> None:
    for said in run_both("other"):
        assert said.startswith("data: expected the same batches in every process")
