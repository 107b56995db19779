"""Starts processes on this machine that train together, and starts them again when one dies.

A process whose peers are gone cannot go on: JAX ends it, or it waits for ever. So all are ended,
and all are started again; with a `Checkpointer` they go on from the last checkpoint.
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
from collections.abc import Iterator, Sequence
from typing import IO

_LOOK = 0.05  # seconds between two looks at the processes
_LAST_WORDS = 2.0  # seconds from SIGTERM to SIGKILL for the others, when one has died
_USAGE = 2  # the status of a script that refuses its arguments, by argparse's convention
_TERMINATED = 128 + signal.SIGTERM


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs ``python -m functrain.launch``; returns the exit status."""
    parser = _parser()
    options = parser.parse_args(arguments)
    if not os.path.exists(options.script):
        parser.error(
            f"argument script: expected a Python file, got {options.script!r}: no such file"
        )
    if options.bind and (reason := _cannot_bind(options.processes)):
        parser.error(f"argument --bind: {reason}")
    with _noted_signals() as signals:
        for attempt in range(options.restarts + 1):
            if attempt:
                _say(f"starting all of them again ({attempt} of {options.restarts})")
            status = _run(options, signals)
            if status in (0, _TERMINATED, _USAGE) or signals:
                return status
    if options.restarts:
        _say(f"gave up after {options.restarts} restarts")
    return status


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m functrain.launch",
        description="Starts a script in several processes on this machine. The script begins with "
        "functrain.distributed.initialize().",
    )
    add = parser.add_argument
    add("-n", "--processes", type=int, required=True, help="how many")
    add("--restarts", type=int, default=3, help="how often to start all again if one dies (3)")
    add(
        "--grace", type=float, default=60.0, help="seconds from SIGTERM to the end, to save in (60)"
    )
    add("--cpu-devices", type=int, help="devices that each process makes of the CPU, to try things")
    add("--bind", action="store_true", help="give each process CPU cores of its own (Linux)")
    add("script", help="a Python file")
    add("arguments", nargs=argparse.REMAINDER, help="its arguments")
    return parser


def _run(options: argparse.Namespace, signals: list[int]) -> int:
    """Runs all processes to their end; returns the status of the first that failed, or 0."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{free.getsockname()[1]}"
    processes = [_start(options, address, i) for i in range(options.processes)]
    readers = [_mark(process.stdout, i) for i, process in enumerate(processes) if process.stdout]
    try:
        first = _watch(processes, signals, options.grace)
        if first is not None:
            _terminate(processes)
    finally:
        # A process in a computation that waits for a peer notices no other signal.
        for process in processes:
            process.kill()
        statuses = [process.wait() and _status(process) for process in processes]
        for reader in readers:
            reader.join(_LAST_WORDS)
    if signal.SIGTERM in signals:
        return _TERMINATED
    if first is None:  # all of them ended between two looks
        first = next((i for i, status in enumerate(statuses) if status), 0)
    if statuses[first]:
        _say(f"process {first} ended with {statuses[first]}")
    return statuses[first]


def _watch(
    processes: Sequence[subprocess.Popen[str]], signals: list[int], grace: float
) -> int | None:
    """Waits for the processes and passes SIGTERM on; returns the first that failed by itself."""
    deadline: float | None = None  # after SIGTERM was passed on
    while any(process.poll() is None for process in processes):
        failed = [i for i, process in enumerate(processes) if process.poll() not in (None, 0)]
        if signal.SIGTERM in signals and deadline is None:
            deadline = time.monotonic() + grace
            for process in processes:
                process.terminate()
        elif deadline is not None and time.monotonic() > deadline:
            _say(f"not ended within {grace:g} s of SIGTERM: killed")
            return None
        elif failed and not signals and _status(processes[failed[0]]) != _TERMINATED:
            return failed[0]
        time.sleep(_LOOK)
    return None


def _terminate(processes: Sequence[subprocess.Popen[str]]) -> None:
    """Sends SIGTERM to all processes, and waits a little for them to end."""
    for process in processes:
        process.terminate()
    until = time.monotonic() + _LAST_WORDS
    while any(process.poll() is None for process in processes) and time.monotonic() < until:
        time.sleep(_LOOK)


def _start(options: argparse.Namespace, address: str, number: int) -> subprocess.Popen[str]:
    """Starts a process; all but the first have their output marked."""
    environment = {
        **os.environ,
        "JAX_COORDINATOR_ADDRESS": address,
        "JAX_NUM_PROCESSES": str(options.processes),
        "JAX_PROCESS_ID": str(number),
    }
    if options.cpu_devices is not None:
        count = f"--xla_force_host_platform_device_count={options.cpu_devices}"
        environment["XLA_FLAGS"] = f"{environment.get('XLA_FLAGS', '')} {count}".strip()
    process = subprocess.Popen(
        [sys.executable, options.script, *options.arguments],
        env=environment,
        stdout=None if number == 0 else subprocess.PIPE,
        stderr=None if number == 0 else subprocess.STDOUT,
        text=True,
    )
    if options.bind:  # before it has threads, which are bound as it is
        os.sched_setaffinity(process.pid, _cores(number, options.processes))
    return process


def _cannot_bind(processes: int) -> str:
    """Returns why processes cannot have cores of their own; "" if they can."""
    if not hasattr(os, "sched_setaffinity"):
        return "this system does not bind processes to cores"
    cores = len(os.sched_getaffinity(0))
    return f"{processes} processes, but {cores} cores" if cores < processes else ""


def _cores(number: int, processes: int) -> list[int]:
    """Returns a process's part of the cores that this one may use: neighbours, none left over."""
    cores = sorted(os.sched_getaffinity(0))
    ends = [len(cores) * i // processes for i in (number, number + 1)]
    return cores[slice(*ends)]


def _mark(lines: IO[str], number: int) -> threading.Thread:
    """Passes on what one of them prints, line by line, with its number."""

    def pass_on() -> None:
        with lines:
            for line in lines:
                sys.stdout.write(f"[{number}] {line}")  # at once: the others write, too
                sys.stdout.flush()

    reader = threading.Thread(target=pass_on, daemon=True)
    reader.start()
    return reader


def _status(process: subprocess.Popen[str]) -> int:
    """Returns the exit status as a shell has it."""
    code = process.returncode
    return 128 - code if code < 0 else code


@contextlib.contextmanager
def _noted_signals() -> Iterator[list[int]]:
    """Notes SIGTERM and the first Ctrl-C, which reaches the processes by itself."""
    signals: list[int] = []

    def note(number: int, frame: object) -> None:
        if signal.SIGINT in signals and number == signal.SIGINT:
            raise KeyboardInterrupt
        signals.append(number)

    before = {number: signal.signal(number, note) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield signals
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _say(what: str) -> None:
    print(f"functrain.launch: {what}", file=sys.stderr, flush=True)
