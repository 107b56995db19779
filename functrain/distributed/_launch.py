"""``python -m functrain.launch``: starts processes that train together, and restarts them.

A process whose peers have died cannot continue: JAX aborts it, or it waits forever. So when one
process dies, all are stopped, and all are started again. With a `Checkpointer` they resume from the
last checkpoint.
"""

import argparse
import contextlib
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import IO

from functrain.common._paths import path_text

_POLL_INTERVAL = 0.05  # seconds
_KILL_DELAY = 2.0  # seconds from SIGTERM to SIGKILL for the others, when one has died
# The status of argparse for wrong arguments, with which a restart would fail again.
_USAGE_ERROR = 2
_TERMINATED = 128 + signal.SIGTERM
# Asks Linux to kill this process when the launcher dies (PR_SET_PDEATHSIG is 1), and becomes the
# script. A `preexec_fn` would fork, which is not safe where JAX has started threads.
_END_WITH_LAUNCHER = """
import ctypes, os, sys
ctypes.CDLL(None).prctl(1, 9)
if os.getppid() == int(sys.argv[1]):  # otherwise it died before the call
    os.execv(sys.executable, [sys.executable, *sys.argv[2:]])
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command, and returns its exit status."""
    parser = _parser()
    options = parser.parse_args(arguments)
    if not os.path.exists(options.script):
        parser.error(f"argument script: expected a Python file, got no file {options.script!r}")
    problem = _binding_problem(options.processes) if options.bind else ""
    if problem:
        parser.error(f"argument --bind: {problem}")
    with _recorded_signals() as signals:
        for attempt in range(options.restarts + 1):
            if attempt:
                _print(f"restarting all processes ({attempt} of {options.restarts})")
            status = _run(options, signals)
            if status in (0, _TERMINATED, _USAGE_ERROR) or signals:
                return status
    if options.restarts:
        _print(f"gave up after {options.restarts} restarts")
    return status


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m functrain.launch",
        description="Starts a script in several processes on this machine. The script has to call "
        "functrain.distributed.initialize() first.",
    )
    add = parser.add_argument
    count = _at_least(1, int)
    add("-n", "--processes", type=count, required=True, help="number of processes")
    help_text = "restarts of all processes after one dies (3)"
    add("--restarts", type=_at_least(0, int), default=3, help=help_text)
    help_text = "seconds to save in after SIGTERM (60)"
    add("--grace", type=_at_least(0, float), default=60.0, help=help_text)
    add("--cpu-devices", type=count, help="CPU devices that each process simulates, for tests")
    add("--bind", action="store_true", help="give each process its own CPU cores (Linux)")
    add("script", type=path_text, help="a Python file")
    add("arguments", nargs=argparse.REMAINDER, help="its arguments")
    return parser


def _at_least(minimum: int, kind: type[int] | type[float]) -> Callable[[str], float]:
    """Returns a function that converts an argument to a number, and refuses smaller ones."""

    def convert(text: str) -> float:
        with contextlib.suppress(ValueError):
            if (number := kind(text)) >= minimum:
                return number
        noun = "an integer" if kind is int else "a number"
        raise argparse.ArgumentTypeError(f"expected {noun} of at least {minimum}, got {text!r}")

    return convert


def _run(options: argparse.Namespace, signals: list[int]) -> int:
    """Runs all processes to their end; returns the status of the first that failed, or 0."""
    # The system chooses a free port, which the first process listens to.
    with socket.socket() as free_socket:
        free_socket.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{free_socket.getsockname()[1]}"
    processes, readers = list[subprocess.Popen[str]](), []
    try:
        for number in range(options.processes):
            processes.append(_start(options, address, number))
        for number, process in enumerate(processes):
            if process.stdout:
                readers.append(_prefix_lines(process.stdout, number))
        first_failed = _wait_for_failure(processes, signals, options.grace)
        if first_failed is not None:
            _terminate(processes)
    finally:
        statuses = _kill(processes)
        for reader in readers:
            reader.join(_KILL_DELAY)
    expected = (0, _TERMINATED) if signal.SIGTERM in signals else (0,)
    if first_failed is None:  # all of them may have ended between two polls
        first_failed = next((i for i, x in enumerate(statuses) if x not in expected), None)
    if first_failed is None:
        return expected[-1]
    _print(f"process {first_failed} ended with {statuses[first_failed]}")
    return statuses[first_failed]


def _wait_for_failure(
    processes: Sequence[subprocess.Popen[str]], signals: list[int], grace: float
) -> int | None:
    """Waits for the processes, and forwards SIGTERM; returns the first that failed without it."""
    deadline: float | None = None  # set when SIGTERM is forwarded
    while _any_is_running(processes):
        failed = [i for i, process in enumerate(processes) if process.poll() not in (None, 0)]
        if signal.SIGTERM in signals and deadline is None:
            deadline = time.monotonic() + grace
            for process in processes:
                process.terminate()
        elif deadline is not None and time.monotonic() > deadline:
            _print(f"not ended within {grace:g} s of SIGTERM: killed")
            return None
        elif failed and not signals and _exit_status(processes[failed[0]]) != _TERMINATED:
            return failed[0]
        time.sleep(_POLL_INTERVAL)
    return None


def _terminate(processes: Sequence[subprocess.Popen[str]]) -> None:
    """Sends SIGTERM to all processes, and waits a little for them to end."""
    for process in processes:
        process.terminate()
    deadline = time.monotonic() + _KILL_DELAY
    while _any_is_running(processes) and time.monotonic() < deadline:
        time.sleep(_POLL_INTERVAL)


def _kill(processes: Sequence[subprocess.Popen[str]]) -> list[int]:
    """Kills processes that still run; returns all exit statuses, 143 for those that it killed."""
    # A process that waits for a peer within a computation reacts to no other signal.
    running = [process for process in processes if process.poll() is None]
    statuses = []
    for process in running:
        process.kill()
    for process in processes:
        process.wait()
        statuses.append(_TERMINATED if process in running else _exit_status(process))
    return statuses


def _any_is_running(processes: Sequence[subprocess.Popen[str]]) -> bool:
    return any(process.poll() is None for process in processes)


def _start(options: argparse.Namespace, address: str, number: int) -> subprocess.Popen[str]:
    """Starts a process. The output of all but the first goes to a pipe."""
    # Read by functrain.distributed.initialize().
    environment = {
        **os.environ,
        "JAX_COORDINATOR_ADDRESS": address,
        "JAX_NUM_PROCESSES": str(options.processes),
        "JAX_PROCESS_ID": str(number),
    }
    if options.cpu_devices is not None:
        flag = f"--xla_force_host_platform_device_count={options.cpu_devices}"
        environment["XLA_FLAGS"] = f"{environment.get('XLA_FLAGS', '')} {flag}".strip()
    command = [sys.executable]
    if sys.platform == "linux":
        command += ["-I", "-S", "-c", _END_WITH_LAUNCHER, str(os.getpid())]
    process = subprocess.Popen(
        [*command, options.script, *options.arguments],
        env=environment,
        stdout=None if number == 0 else subprocess.PIPE,
        stderr=None if number == 0 else subprocess.STDOUT,
        text=True,
        errors="replace",
    )
    # Before the process starts threads, which inherit its cores.
    if options.bind:
        os.sched_setaffinity(process.pid, _cores(number, options.processes))
    return process


def _binding_problem(processes: int) -> str:
    """Returns why processes cannot be bound to their own cores; "" if they can."""
    if not hasattr(os, "sched_setaffinity"):
        return "this system does not bind processes to cores"
    cores = len(os.sched_getaffinity(0))
    return f"{processes} processes, but {cores} cores" if cores < processes else ""


def _cores(number: int, processes: int) -> list[int]:
    """Returns the cores of a process: neighbours, so that every core is used."""
    cores = sorted(os.sched_getaffinity(0))
    begin, end = len(cores) * number // processes, len(cores) * (number + 1) // processes
    return cores[begin:end]


def _prefix_lines(lines: IO[str], number: int) -> threading.Thread:
    """Prints the lines of a process with its number, in a thread."""

    def print_lines() -> None:
        encoding = sys.stdout.encoding or "utf-8"
        with lines:
            for line in lines:
                # An error here would close the pipe, and so end the process that writes to it.
                text = f"[{number}] {line}".encode(encoding, "replace").decode(encoding)
                # In one call, because the threads of other processes write, too.
                sys.stdout.write(text)
                sys.stdout.flush()

    reader = threading.Thread(target=print_lines, daemon=True)
    reader.start()
    return reader


def _exit_status(process: subprocess.Popen[str]) -> int:
    """Returns the exit status as a shell reports it: 128 plus the number of a signal."""
    code = process.returncode
    return 128 - code if code < 0 else code


@contextlib.contextmanager
def _recorded_signals() -> Iterator[list[int]]:
    """Context manager that records SIGTERM and the first Ctrl-C instead of handling them.

    The terminal sends Ctrl-C to the processes as well.
    """
    signals: list[int] = []

    def record(number: int, frame: object) -> None:
        if signal.SIGINT in signals and number == signal.SIGINT:
            raise KeyboardInterrupt
        signals.append(number)

    old_sigterm = signal.signal(signal.SIGTERM, record)
    old_sigint = signal.signal(signal.SIGINT, record)
    try:
        yield signals
    finally:
        signal.signal(signal.SIGTERM, old_sigterm)
        signal.signal(signal.SIGINT, old_sigint)


def _print(message: str) -> None:
    print(f"functrain.launch: {message}", file=sys.stderr, flush=True)
