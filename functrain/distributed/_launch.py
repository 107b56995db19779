"""``python -m functrain.launch``: starts processes that train together, and restarts them.

A process whose peers have died cannot continue: JAX aborts it, or it waits forever. So when one
process dies, all are stopped, and all are started again. With a `Checkpointer` they resume from the
last checkpoint.
"""

import argparse
import contextlib
import math
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from typing import IO, TypeAlias

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

Process: TypeAlias = subprocess.Popen[bytes]


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command, and returns its exit status."""
    options = _parse(arguments)
    signals: list[int] = []
    with contextlib.ExitStack() as at_end:
        for number in (signal.SIGTERM, signal.SIGINT):
            old_handler = signal.signal(number, lambda number, _: signals.append(number))
            at_end.callback(signal.signal, number, old_handler)
        for attempt in range(options.restarts + 1):
            if attempt:
                _print(f"restarting all processes ({attempt} of {options.restarts})")
            status = _run(options, signals)
            if status in (0, _TERMINATED, _USAGE_ERROR) or signals:
                break
    return status


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m functrain.launch",
        description="Starts a script in several processes on this machine. The script has to call "
        "functrain.distributed.initialize() first.",
    )
    add = parser.add_argument
    add("-n", "--processes", type=int, required=True, help="number of processes")
    add("--restarts", type=int, default=3, help="restarts of all processes after one dies (3)")
    add("--grace", type=float, default=60.0, help="seconds to save in after SIGTERM (60)")
    add("--cpu-devices", type=int, help="CPU devices that each process simulates, for tests")
    add("--bind", action="store_true", help="give each process its own CPU cores (Linux)")
    add("script", type=path_text, help="a Python file")
    # Otherwise argparse names them among those that are missing.
    add("arguments", nargs=argparse.REMAINDER, help="its arguments").required = False
    options = parser.parse_args(arguments)
    if options.processes < 1 or options.restarts < 0:
        parser.error("expected --processes of at least 1, and --restarts of at least 0")
    return options


def _run(options: argparse.Namespace, signals: list[int]) -> int:
    """Runs all processes to their end, and returns one exit status for all.

    It is that of the first that failed, 0 if all succeeded, and otherwise that of SIGTERM.
    """
    # The system chooses a free port, which the first process listens to.
    with socket.socket() as free_socket:
        free_socket.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{free_socket.getsockname()[1]}"
    processes: list[Process] = []
    readers: list[threading.Thread] = []
    try:
        for number in range(options.processes):
            process = _start(options, address, number)
            processes.append(process)
            if process.stdout:
                arguments = (process.stdout, number)
                readers.append(threading.Thread(target=_print_lines, args=arguments, daemon=True))
                readers[-1].start()
        _wait(processes, signals, options.grace)
        statuses = list(map(_exit_status, processes))
    finally:
        _end(processes)
    for reader in readers:
        reader.join(_KILL_DELAY)
    failed = {i: x for i, x in enumerate(statuses) if x not in (None, 0, _TERMINATED)}
    for number, status in failed.items():
        _print(f"process {number} ended with {status}")
    return next(iter(failed.values()), 0 if set(statuses) == {0} else _TERMINATED)


def _wait(processes: Sequence[Process], signals: list[int], grace: float) -> None:
    """Waits until all processes have ended, or one has failed; forwards SIGTERM."""
    deadline = math.inf  # set at a signal
    while any(process.poll() is None for process in processes):
        statuses = set(map(_exit_status, processes))
        if not signals and statuses - {None, 0, _TERMINATED}:
            return
        if signals and deadline == math.inf:
            deadline = time.monotonic() + grace
            # The terminal sends Ctrl-C to the processes as well.
            for process in processes if signal.SIGTERM in signals else ():
                process.terminate()
        if time.monotonic() > deadline:
            _print(f"not ended within {grace:g} s of the signal: killed")
            return
        time.sleep(_POLL_INTERVAL)


def _end(processes: Sequence[Process]) -> None:
    """Ends the processes that still run: by SIGTERM, and a little later by SIGKILL."""
    for process in processes:
        process.terminate()
    deadline = time.monotonic() + _KILL_DELAY
    for process in processes:
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(max(0, deadline - time.monotonic()))
    # A process that waits for a peer within a computation reacts to no other signal.
    for process in processes:
        process.kill()
        process.wait()


def _start(options: argparse.Namespace, address: str, number: int) -> Process:
    """Starts a process. The output of all but the first goes to a pipe."""
    # Read by functrain.distributed.initialize().
    environment = {
        **os.environ,
        "JAX_COORDINATOR_ADDRESS": address,
        "JAX_NUM_PROCESSES": str(options.processes),
        "JAX_PROCESS_ID": str(number),
    }
    if options.cpu_devices is not None:
        environment["JAX_NUM_CPU_DEVICES"] = str(options.cpu_devices)
    command = [sys.executable]
    if sys.platform == "linux":
        command += ["-I", "-S", "-c", _END_WITH_LAUNCHER, str(os.getpid())]
    process = subprocess.Popen(
        [*command, options.script, *options.arguments],
        env=environment,
        stdout=None if number == 0 else subprocess.PIPE,
        stderr=None if number == 0 else subprocess.STDOUT,
    )
    # Before the process starts threads, which inherit its cores. Neighbours share their caches.
    if options.bind:
        cores, n = sorted(os.sched_getaffinity(0)), options.processes
        begin, end = len(cores) * number // n, len(cores) * (number + 1) // n
        os.sched_setaffinity(process.pid, cores[begin:end])
    return process


def _print_lines(lines: IO[bytes], number: int) -> None:
    """Prints the lines of a process with its number."""
    with lines:
        for line in lines:
            # In one call, because the threads of other processes write, too.
            sys.stdout.buffer.write(b"[%d] %b" % (number, line))
            sys.stdout.flush()


def _exit_status(process: Process) -> int | None:
    """Returns the exit status as a shell reports it: 128 plus the number of a signal."""
    code = process.poll()
    return 128 - code if code is not None and code < 0 else code


def _print(message: str) -> None:
    print(f"functrain.launch: {message}", file=sys.stderr, flush=True)
