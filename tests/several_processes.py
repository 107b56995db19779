"""Programs in several processes on this machine, and what they print."""

import os
import pathlib
import socket
import subprocess
import sys

from tests import fork_server

ROOT = pathlib.Path(__file__).parent.parent
TRAINING = str(ROOT / "tests/checkpoint/processes.py")


def start(
    processes: int,
    program: list[str],
    *arguments: str,
    popen: type[subprocess.Popen[str]] = fork_server.Popen,
) -> list[subprocess.Popen[str]]:
    """Starts a program, such as ``["-c", text]``, in processes that connect to each other."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{free.getsockname()[1]}"
    variables = {
        "JAX_COORDINATOR_ADDRESS": address,
        "JAX_NUM_PROCESSES": str(processes),
        "PYTHONPATH": str(ROOT),
    }
    return [
        popen(
            [sys.executable, *program, *arguments],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            cwd=ROOT,
            env={**os.environ, **variables, "JAX_PROCESS_ID": str(number)},
        )
        for number in range(processes)
    ]


def outputs(processes: list[subprocess.Popen[str]], code: int = 0) -> list[list[str]]:
    """Waits until processes have ended with a status; returns the lines that each has printed."""
    results = [(process.communicate(timeout=180), process.returncode) for process in processes]
    errors = [stderr[-3000:] for (_, stderr), _ in results]
    assert [status for _, status in results] == [code] * len(results), errors
    printed = (stdout.splitlines() for (stdout, _), _ in results)
    return [[line for line in lines if "peer ranks" not in line] for lines in printed]


def lines_starting(printed: list[list[str]], text: str) -> list[str]:
    """Returns the first line of each process with a start; C++ libraries print others between."""
    return [next(line for line in lines if line.startswith(text)) for lines in printed]


def train(processes: int, directory: pathlib.Path, epochs: int) -> list[list[str]]:
    """Runs `tests/checkpoint/processes.py`, and returns what it prints."""
    return outputs(start(processes, [TRAINING], str(directory), str(epochs)))
