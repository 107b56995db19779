"""The driver process: starts the workers, and measures one way at a time in several rounds."""

import dataclasses
import os
import pathlib
import socket
import statistics
import subprocess
import tempfile
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Self

from benchmarks.ways import KERAS_BACKENDS, Way
from benchmarks.worker import Line
from benchmarks.workloads import Workload

ROOT = pathlib.Path(__file__).parents[1]
# The seconds in which a worker must have imported its backend.
IMPORT_TIMEOUT = 120.0


@dataclasses.dataclass
class Measured:
    """The measurements of one way with one workload.

    Attributes:
      seconds: Seconds per step, one entry for each round.
      losses: The mean losses of the first and the second call. Equal work has equal losses.
      compile_seconds: The extra seconds of the first call, compared with the median call.
      peak_bytes: The peak memory of the process, including imports.
      error: The reason for a failure, or "".
    """

    seconds: list[float] = dataclasses.field(default_factory=list)
    losses: list[float] = dataclasses.field(default_factory=list)
    compile_seconds: float = float("nan")
    peak_bytes: int = 0
    error: str = ""

    @property
    def median(self) -> float:
        """The median of the seconds per step."""
        return statistics.median(self.seconds) if self.seconds else float("nan")


class Backends:
    """The worker process of each environment, started when it is first used.

    Args:
      pythons: The Python interpreter of each environment.
    """

    def __init__(self, pythons: Mapping[str, str]) -> None:
        self._pythons = pythons
        self._workers: dict[str, tuple[subprocess.Popen[bytes], Line]] = {}
        self._folder = tempfile.TemporaryDirectory()
        self._address = os.path.join(self._folder.name, "socket")
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(self._address)
        self._listener.listen()
        self._listener.settimeout(IMPORT_TIMEOUT)
        self.versions: dict[str, dict[str, str]] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        for process, line in self._workers.values():
            line.close()
            process.terminate()
            process.wait()
        self._listener.close()
        self._folder.cleanup()

    def start(self, way: Way, workload: Workload, steps: int | None) -> Line:
        """Returns a connection to a new process that prepares the way."""
        if way.environment not in self._workers:
            self._workers[way.environment] = self._launch(way.environment)
        _, line = self._workers[way.environment]
        line.send(way=way.name, workload=workload.name, steps=steps)
        return self._accept()

    def _launch(self, environment: str) -> tuple[subprocess.Popen[bytes], Line]:
        path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
        backend = KERAS_BACKENDS.get(environment, environment)
        # Without PyTorch's cache of compiled functions on disk, whose time would not be measured.
        settings = {"TF_CPP_MIN_LOG_LEVEL": "3", "TORCHINDUCTOR_FORCE_DISABLE_CACHES": "1"}
        env = {**os.environ, **settings, "KERAS_BACKEND": backend, "PYTHONPATH": path}
        command = [self._pythons[environment], "-m", "benchmarks.worker"]
        process = subprocess.Popen([*command, self._address, environment], env=env, cwd=ROOT)
        line = self._accept()
        self.versions[environment] = line.receive()["versions"]
        return process, line

    def _accept(self) -> Line:
        try:
            connection, _ = self._listener.accept()
        except TimeoutError:
            raise RuntimeError(
                f"a worker did not answer within {IMPORT_TIMEOUT:.0f} s; its messages are above"
            ) from None
        connection.settimeout(None)
        return Line(connection)


def measure(
    backends: Backends,
    workload: Workload,
    ways: Iterable[Way],
    *,
    rounds: int,
    steps: int | None = None,
    say: Callable[[str], None] = print,
) -> dict[str, Measured]:
    """Measures the ways of one workload, interleaved.

    Every way is called once to compile, once to warm up, and once in each round. Each round
    starts with a different way, so that none has an advantage from its place in the order.
    """
    results: dict[str, Measured] = {}
    lines: dict[str, Line] = {}
    per_call = steps or workload.steps
    for way in ways:
        say(f"{workload.name}: compiling {way.name}")
        results[way.name] = Measured()
        lines[way.name] = backends.start(way, workload, steps)
        first = _next(lines, way.name, results)
        results[way.name].compile_seconds = first.get("seconds", float("nan"))
    for number in range(-1, rounds):
        names = list(lines)
        start = number % max(1, len(names))
        for name in names[start:] + names[:start]:
            say(f"{workload.name}: round {number + 1} of {rounds}, {name}")
            reply = _next(lines, name, results, run=True)
            if reply and number >= 0:
                results[name].seconds.append(reply["seconds"] / per_call)
    for result in results.values():
        result.compile_seconds = max(0.0, result.compile_seconds - result.median * per_call)
    for line in lines.values():
        line.close()
    return results


def _next(
    lines: dict[str, Line], name: str, results: dict[str, Measured], **request: bool
) -> dict[str, Any]:
    """Sends a worker a request, and records its next message; drops it if it reports an error."""
    result = results[name]
    try:
        if request:
            lines[name].send(**request)
        reply = lines[name].receive()
    except EOFError as error:
        reply = {"error": str(error)}
    if "error" in reply:
        result.error = reply["error"]
        lines.pop(name).close()
        return {}
    if len(result.losses) < 2:
        result.losses.append(reply["loss"])
    result.peak_bytes = reply["peak_bytes"]
    return reply
