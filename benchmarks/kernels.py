"""Lists the kernels of a fused step, with the operations in each and their times in a trace.

python -m benchmarks.kernels --workload vit
python -m benchmarks.kernels --workload lstm --rewrites off --top 20

`benchmarks.profile` times each operation alone. This module traces the whole program while it runs.
For a product that runs in parallel with others, the trace may have only the time to start it. The
sum of the kernels is then less than the time of the step. For a step of your own, call
`kernels(step, state, batch)`.
"""

import argparse
import collections
import os
import pathlib
import re
import tempfile
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

os.environ.setdefault("KERAS_BACKEND", "jax")

import jax
import numpy as np
from rich import box
from rich.table import Table

import functrain as ft
from functrain.common import _table

# Steps in the program.
K = 2
HOLD_OTHERS = {"while", "call", "conditional"}
NO_WORK = {"parameter", "constant", "broadcast", "bitcast", "tuple", "get-tuple-element", "iota"}
COMPUTATION = re.compile(r"^(?:ENTRY )?%?([\w.-]+) \(.*\{$")
INSTRUCTION = re.compile(r"^\s+(?:ROOT )?%?([\w.-]+) = (\(.*?\)|\S+) ([\w-]+)\(")


class Kernel(NamedTuple):
    """One kernel of a step.

    Attributes:
      name: The name that XLA gave to the kernel.
      count: The number of runs in a step.
      seconds: Seconds of one run, the lower quartile.
      result: The type of the result, such as ``f32[32,49,64]``.
      contents: The operations in the kernel and their counts, such as "multiply 3, add".
      where: The layer and the operation of the kernel's last instruction.
    """

    name: str
    count: float
    seconds: float
    result: str
    contents: str
    where: str


def kernels(
    step: ft.Step[Any], state: Any, batch: Any, *, rewrites: Any = "auto", rounds: int = 20
) -> list[Kernel]:
    """Returns the kernels of a step, found by tracing a fused program of it.

    Args:
      step: ``(state, batch) -> (state, logs)``; one with metrics takes ``step.start(state)``.
      state: The state, which is not donated.
      batch: One batch.
      rewrites: As for `functrain.fuse`.
      rounds: The number of runs of the program.

    Returns:
      The kernels; those that take most of the step come first.
    """
    fused = ft.fuse(step, K, rewrites=rewrites, donate=False)
    chunk = jax.tree.map(lambda x: np.stack([np.asarray(x)] * K), batch)
    text = fused.lower(state, chunk, np.int32(K)).compile().as_text()
    instructions = {
        name: (result, kind, line) for _, name, result, kind, line in _instructions(text)
    }
    jax.block_until_ready(fused(state, chunk))
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder):
            for _ in range(rounds):
                jax.block_until_ready(fused(state, chunk))
        times = _times(pathlib.Path(folder))
    inside = _contents(text)
    result_kernels = []
    for name, seconds in times.items():
        result, kind, line = instructions.get(name, ("", "", ""))
        if kind not in HOLD_OTHERS:
            called = re.search(r"calls=%?([\w.-]+)", line)
            contents = inside.get(called[1], kind) if called else kind
            count = len(seconds) / rounds / K
            duration = float(np.quantile(seconds, 0.25))
            result_kernels.append(
                Kernel(name, count, duration, result.split("{")[0], contents, _where(line))
            )
    return sorted(result_kernels, key=lambda kernel: -kernel.count * kernel.seconds)


def _times(folder: pathlib.Path) -> dict[str, list[float]]:
    """Returns the seconds of each run of each kernel in a trace."""
    (path,) = folder.rglob("*.xplane.pb")
    times: dict[str, list[float]] = collections.defaultdict(list)
    for plane in jax.profiler.ProfileData.from_file(str(path)).planes:
        for event in (event for line in plane.lines for event in line.events):
            if name := dict(event.stats).get("hlo_op"):
                times[name].append(event.duration_ns / 1e9)
    return times


def _instructions(text: str) -> Iterator[tuple[str, str, str, str, str]]:
    """Yields the computation, name, type, kind and line of each instruction in a program."""
    computation = ""
    for line in text.splitlines():
        if begins := COMPUTATION.match(line):
            computation = begins[1]
        elif match := INSTRUCTION.match(line):
            yield computation, match[1], match[2], match[3], line


def _contents(text: str) -> dict[str, str]:
    """Returns a description of the operations in each computation."""
    counts: dict[str, collections.Counter[str]] = collections.defaultdict(collections.Counter)
    for computation, _, _, kind, _ in _instructions(text):
        if kind not in NO_WORK:
            counts[computation][kind] += 1
    return {
        name: ", ".join(f"{kind} {n}" if n > 1 else kind for kind, n in each.items())
        for name, each in counts.items()
    }


def _where(line: str) -> str:
    match = re.search(r'op_name="([^"]*)"', line)
    name = match[1].partition(";")[0] if match else ""
    return re.sub(r"jit\(\w+\)/|while/body/|closed_call/", "", name)


def table(kernels: Sequence[Kernel], top: int) -> str:
    """Returns a table of the first kernels, and the total time of all."""
    table = Table(box=box.MARKDOWN)
    for heading in ("kernel", "contents", "count", "µs each", "µs a step", "result", "where"):
        right = heading in ("count", "µs each", "µs a step")
        table.add_column(heading, justify="right" if right else "left", no_wrap=True)
    for name, count, seconds, result, contents, where in kernels[:top]:
        each, step = (f"{1e6 * value:.3g}" for value in (seconds, count * seconds))
        table.add_row(name, contents, f"{count:g}", each, step, result, where)
    total, number = sum(k.count * k.seconds for k in kernels), sum(k.count for k in kernels)
    return f"{_table.render(table)}\n\n{number:.0f} kernels in a step take {1e3 * total:.3g} ms."


def main(arguments: Sequence[str] | None = None) -> None:
    """Runs the command line."""
    from benchmarks.profile import example
    from benchmarks.workloads import WORKLOADS

    parser = argparse.ArgumentParser("benchmarks.kernels", description=__doc__)
    parser.add_argument("--workload", choices=WORKLOADS, default="vit")
    parser.add_argument("--rewrites", choices=("auto", "exact", "off"), default="auto")
    parser.add_argument("--top", type=int, default=30, help="rows to show")
    args = parser.parse_args(arguments)
    print(table(kernels(*example(WORKLOADS[args.workload]), rewrites=args.rewrites), args.top))


if __name__ == "__main__":
    main()
