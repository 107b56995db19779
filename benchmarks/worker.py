"""The worker process of an environment, which imports Keras once and forks for each way.

Every way runs in its own process, so its peak memory and compilations are not mixed with those of
other ways. The processes stay alive while others are measured, so that rounds can be interleaved.
Messages are lines of JSON over a Unix socket, because each environment has its own interpreter.
"""

import contextlib
import dataclasses
import importlib.metadata
import json
import os
import resource
import signal
import socket
import sys
import time
from typing import Any

_DIED = "the process at the other end has died; its messages are above"


class Line:
    """A connection on which both sides send lines of JSON."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._file = connection.makefile("rw")

    def send(self, **message: Any) -> None:
        """Sends one message; raises EOFError if the other process has ended."""
        try:
            self._file.write(json.dumps(message) + "\n")
            self._file.flush()
        except ConnectionError:
            raise EOFError(_DIED) from None

    def receive(self) -> dict[str, Any]:
        """Waits for a message; raises EOFError if the other process has ended."""
        try:
            line = self._file.readline()
        except ConnectionError:
            line = ""
        if not line:
            raise EOFError(_DIED)
        return json.loads(line)

    def close(self) -> None:
        """Closes the connection, after which the worker at the other end exits."""
        # A message that could not be sent is still in the buffer of the file.
        with contextlib.suppress(ConnectionError):
            self._file.close()
        self._connection.close()


def connect(address: str) -> Line:
    """Returns a connection to the driver."""
    connection = socket.socket(socket.AF_UNIX)
    connection.connect(address)
    return Line(connection)


def main(address: str, environment: str) -> None:
    """Imports the backend, then forks a child for each order of the driver."""
    backend = os.environ["KERAS_BACKEND"]
    from benchmarks import ways, workloads  # noqa: F401

    # Importing takes most of the start of a process, so it is done before the fork. The imports
    # must not use a device, because JAX's threads would not survive the fork.
    if environment == "jax":
        from benchmarks import flax_ways  # noqa: F401
    # Finished children are removed without a call of `wait`.
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    line = connect(address)
    line.send(versions={name: _version(name) for name in ("keras", backend, "numpy")})
    with contextlib.suppress(EOFError):
        while order := line.receive():
            if os.fork() == 0:
                _child(connect(address), **order)


def _version(name: str) -> str:
    names = (name, f"{name}-cpu", f"{name}_cpu", f"{name}-nightly")
    for distribution in names:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            return importlib.metadata.version(distribution)
    return "?"


def _child(line: Line, **order: Any) -> None:
    """Serves one way until the driver closes the connection, then exits the process."""
    code = 0
    try:
        serve(line, **order)
    except EOFError:
        pass
    except Exception as error:
        code = 1
        first_line = str(error).partition("\n")[0]
        line.send(error=f"{type(error).__name__}: {first_line}")
        sys.excepthook(*sys.exc_info())
    finally:
        sys.stderr.flush()
        os._exit(code)


def serve(line: Line, *, way: str, workload: str, steps: int | None) -> None:
    """Prepares a way, reports its first call, then measures at each request."""
    from benchmarks.ways import PREDICTING, WAYS
    from benchmarks.workloads import WORKLOADS

    work = WORKLOADS[workload]
    work = dataclasses.replace(work, steps=steps or work.steps)
    run = (WAYS | PREDICTING)[way].prepare(work)
    line.send(**_timed(run))
    while line.receive():
        line.send(**_timed(run))


def _timed(run: Any) -> dict[str, float]:
    start = time.perf_counter()
    loss = run()
    seconds = time.perf_counter() - start
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    peak_bytes = peak * (1 if sys.platform == "darwin" else 1024)
    return {"seconds": seconds, "loss": float(loss), "peak_bytes": peak_bytes}


if __name__ == "__main__":
    main(*sys.argv[1:])
