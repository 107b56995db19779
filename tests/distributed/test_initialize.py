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
    words = f"functrain: process {number} of 2, coordinator {address}: not all processes"
    assert words in done.stderr


@pytest.mark.parametrize(
    ("number", "address", "words"),
    [
        ("2", "127.0.0.1:1", "process_id: expected a number from 0 to 1, since num_processes is 2"),
        ("1", "127.0.0.1", "coordinator_address: expected host:port, got '127.0.0.1'"),
        ("0", None, "initialize: expected coordinator_address, num_processes and process_id, or a"),
        ("first", None, "JAX_PROCESS_ID: expected a whole number, got 'first'"),
    ],
)
def test_numbers_and_addresses_that_cannot_be_are_refused(number, address, words) -> None:
    rest = {"JAX_COORDINATOR_ADDRESS": address, "JAX_NUM_PROCESSES": "2"} if address else {}
    done = initialize(number, **rest)
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1].startswith(f"ValueError: {words}")
