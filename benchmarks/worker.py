"""The measuring side: one process per Keras backend that imports once, and forks for each way.

Every way has a process of its own, so that its peak memory and its compilations are its own, and
stays alive while others are measured, so that the rounds are interleaved. Messages are lines of
JSON over a Unix socket, since the backends live in environments of their own.
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


class Line:
    """A connection on which both sides send JSON, a line each."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._file = connection.makefile("rw")

    def send(self, **message: Any) -> None:
        """Sends one message."""
        self._file.write(json.dumps(message) + "\n")
        self._file.flush()

    def receive(self) -> dict[str, Any]:
        """Waits for one message; EOFError when the other side is gone."""
        line = self._file.readline()
        if not line:
            raise EOFError("the process at the other end has died; its messages are above")
        return json.loads(line)

    def close(self) -> None:
        """Hangs up: the worker at the other end then exits."""
        self._file.close()
        self._connection.close()


def connect(address: str) -> Line:
    """Returns a connection to the driver."""
    connection = socket.socket(socket.AF_UNIX)
    connection.connect(address)
    return Line(connection)


def main(address: str) -> None:
    """Imports the backend, then forks a child for each order the driver sends."""
    backend = os.environ["KERAS_BACKEND"]
    from benchmarks import ways, workloads  # noqa: F401

    if backend == "jax":  # importing is most of a start; nothing here touches a device
        from benchmarks import flax_ways  # noqa: F401
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # let finished children go
    line = connect(address)
    line.send(versions={name: _version(name) for name in ("keras", backend, "numpy")})
    with contextlib.suppress(EOFError):
        while order := line.receive():
            if os.fork() == 0:
                _child(connect(address), **order)


def _version(name: str) -> str:
    names = (name, f"{name}-cpu", f"{name}_cpu")
    for known in names:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            return importlib.metadata.version(known)
    return "?"


def _child(line: Line, **order: Any) -> None:
    """Serves one way until the driver hangs up; never returns into the parent's loop."""
    code = 0
    try:
        serve(line, **order)
    except EOFError:
        pass
    except Exception as error:
        code = 1
        line.send(error=f"{type(error).__name__}: {str(error).splitlines()[:1]}")
        sys.excepthook(*sys.exc_info())
    finally:
        sys.stderr.flush()
        os._exit(code)


def serve(line: Line, *, way: str, workload: str, steps: int | None) -> None:
    """Prepares a way, reports its first call, then measures as often as it is asked."""
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
    main(sys.argv[1])
