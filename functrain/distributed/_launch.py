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
    asked = parser.parse_args(arguments)
    if not os.path.exists(asked.script):
        parser.error(f"argument script: expected a Python file, got {asked.script!r}: no such file")
    if asked.bind and (why := _cannot_bind(asked.processes)):
        parser.error(f"argument --bind: {why}")
    with _held_signals() as came:
        for attempt in range(asked.restarts + 1):
            code = _run(asked, came)
            if code in (0, _TERMINATED, _USAGE) or came:
                return code
            if attempt < asked.restarts:
                _say(f"starting all of them again ({attempt + 1} of {asked.restarts})")
    if asked.restarts:
        _say(f"gave up after {asked.restarts} restarts")
    return code


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m functrain.launch",
        description="Starts a script in several processes on this machine. The script begins with "
        "functrain.distributed.initialize().",
    )
    parser.add_argument("-n", "--processes", type=int, required=True, help="how many")
    parser.add_argument(
        "--restarts",
        type=int,
        default=3,
        help="how often to start all of them again when one has died (3)",
    )
    parser.add_argument(
        "--grace",
        type=float,
        default=60.0,
        help="seconds from SIGTERM to the end, to save in (60)",
    )
    parser.add_argument(
        "--cpu-devices", type=int, help="devices that each process makes of the CPU, to try things"
    )
    parser.add_argument(
        "--bind",
        action="store_true",
        help="give each process CPU cores of its own (Linux): no threads of one wait for another's",
    )
    parser.add_argument("script", help="a Python file")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, help="its arguments")
    return parser


def _run(asked: argparse.Namespace, came: list[int]) -> int:
    """Runs all processes to their end; returns the status of the first that failed, or 0."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{free.getsockname()[1]}"
    started = [_start(asked, address, i) for i in range(asked.processes)]
    readers = [_mark(process.stdout, i) for i, process in enumerate(started) if process.stdout]
    told, first = None, 0  # when SIGTERM was passed on; the status of who failed first
    try:
        while any(process.poll() is None for process in started):
            failed = [i for i, process in enumerate(started) if process.poll() not in (None, 0)]
            if signal.SIGTERM in came and told is None:
                told = time.monotonic()
                for process in started:
                    process.send_signal(signal.SIGTERM)
            elif told is not None and time.monotonic() > told + asked.grace:
                _say(f"not ended within {asked.grace:g} s of SIGTERM: killed")
                break
            elif failed and not came and _code(started[failed[0]]) != _TERMINATED:
                first = _code(started[failed[0]])
                _say(f"process {failed[0]} ended with {first}")
                _terminate(started)
                break
            time.sleep(_LOOK)
    finally:
        # In the midst of a computation that waits for a peer, no other signal is heard.
        for process in started:
            process.kill()
        codes = [process.wait() and _code(process) for process in started]
        for reader in readers:
            reader.join(_LAST_WORDS)
    if signal.SIGTERM in came:
        return _TERMINATED
    if not first and any(codes):  # all of them ended between two looks
        first = next(filter(None, codes))
        _say(f"process {codes.index(first)} ended with {first}")
    return first


def _terminate(started: Sequence[subprocess.Popen[str]]) -> None:
    """Sends SIGTERM to all processes, and waits a little for them to end."""
    for process in started:
        process.terminate()
    until = time.monotonic() + _LAST_WORDS
    while any(process.poll() is None for process in started) and time.monotonic() < until:
        time.sleep(_LOOK)


def _start(asked: argparse.Namespace, address: str, number: int) -> subprocess.Popen[str]:
    """Starts one of them."""
    environment = {
        **os.environ,
        "JAX_COORDINATOR_ADDRESS": address,
        "JAX_NUM_PROCESSES": str(asked.processes),
        "JAX_PROCESS_ID": str(number),
    }
    if asked.cpu_devices is not None:
        count = f"--xla_force_host_platform_device_count={asked.cpu_devices}"
        environment["XLA_FLAGS"] = f"{environment.get('XLA_FLAGS', '')} {count}".strip()
    process = subprocess.Popen(
        [sys.executable, asked.script, *asked.arguments],
        env=environment,
        stdout=None if number == 0 else subprocess.PIPE,
        stderr=None if number == 0 else subprocess.STDOUT,
        text=True,
    )
    if asked.bind:  # before it has threads, which are bound as it is
        os.sched_setaffinity(process.pid, _cores(number, asked.processes))
    return process


def _cannot_bind(processes: int) -> str:
    """Says why processes cannot have cores of their own, if so."""
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


def _code(process: subprocess.Popen[str]) -> int:
    """The status as a shell has it."""
    code = process.returncode
    return 128 - code if code < 0 else code


@contextlib.contextmanager
def _held_signals() -> Iterator[list[int]]:
    """Notes SIGTERM and the first Ctrl-C, which reaches the processes by itself."""
    came: list[int] = []

    def note(number: int, frame: object) -> None:
        if signal.SIGINT in came and number == signal.SIGINT:
            raise KeyboardInterrupt
        came.append(number)

    before = {number: signal.signal(number, note) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield came
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _say(what: str) -> None:
    print(f"functrain.launch: {what}", file=sys.stderr, flush=True)
