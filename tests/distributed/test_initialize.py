"""What keeps processes from finding each other is said, with the address and the deadline."""

import os
import pathlib
import socket
import subprocess
import sys

import pytest

from tests import fork_server

ROOT = pathlib.Path(__file__).parents[2]


def initialize(own: object, **known: str) -> subprocess.CompletedProcess[str]:
    return fork_server.run(
        [
            sys.executable,
            "-c",
            "import functrain as ft; ft.distributed.initialize(initialization_timeout=2)",
        ],
        env={**os.environ, **known, "JAX_PROCESS_ID": str(own), "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )


@pytest.mark.parametrize("number", [0, 1])
def test_processes_that_do_not_come_are_spoken_of_before_jax_ends_the_one_that_waits(
    number: int,
) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{free.getsockname()[1]}"
    done = initialize(number, JAX_COORDINATOR_ADDRESS=address, JAX_NUM_PROCESSES="2")
    assert done.returncode == -6  # from C++, where nobody can catch it
    config = {"coordinator_address": address, "num_processes": 2, "process_id": number}
    assert f"functrain: not all processes have connected; this one has {config}" in done.stderr


@pytest.mark.parametrize(
    ("number", "address", "words"),
    [
        ("2", "127.0.0.1:1", "process_id"),
        ("1", "127.0.0.1", "coordinator_address: expected host:port, got '127.0.0.1'"),
        ("0", None, "coordinator_address"),
        ("first", None, "'first'"),
    ],
)
def test_numbers_and_addresses_that_cannot_be_are_refused(number, address, words) -> None:
    rest = {"JAX_COORDINATOR_ADDRESS": address, "JAX_NUM_PROCESSES": "2"} if address else {}
    done = initialize(number, **rest)
    assert done.returncode == 1
    last_line = done.stderr.splitlines()[-1]
    assert last_line.startswith("ValueError: ")
    assert words in last_line
