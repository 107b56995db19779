"""Two processes with one mesh: what differs is refused in words, without its numbers."""

import os
import socket
import subprocess
import sys

PROGRAM = """
import sys, jax, jax.numpy as jnp, numpy as np, functrain as ft

rank, port, other = int(sys.argv[1]), sys.argv[2], sys.argv[3]
jax.config.update("jax_cpu_collectives_implementation", "gloo")
address = f"127.0.0.1:{port}"
jax.distributed.initialize(address, 2, rank, coordinator_bind_address=address)
mesh = jax.make_mesh((2,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
data = np.arange(16, dtype=np.float32) + (rank if other == "data" else 0)

def step(total, batch):
    return total + jnp.sum(batch) * (1 + rank if other == "code" else 1), {}

if other == "autotune":
    tuning = ft.autotune(step, jnp.zeros(()), data[:4], ks=(1, 3), sharding=mesh)
    print(tuning.k, [row.microseconds for row in tuning.rows])
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
        subprocess.Popen(
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


def test_autotune_measures_in_all_of_them_and_they_choose_the_same() -> None:
    first, second = run_both("autotune")
    assert first == second
    assert first[:2] in ("1 ", "3 ")


def test_batches_of_each_process_its_own_are_refused_in_words() -> None:
    for said in run_both("data"):
        assert said.startswith("data: expected the same batches in every process")


def test_another_program_in_one_of_them_is_refused_in_both() -> None:
    for said in run_both("code"):
        assert said.startswith("step: expected the same program in every process, got another in 1")


def test_another_number_of_steps_to_a_program_is_refused_in_both() -> None:
    for said in run_both("fuse"):
        assert "got fuse: 'auto' in process 0, 2 in process 1" in said
