"""Lists the kernels of a fused step, with the operations in each and their times in a trace.

python -m benchmarks.kernels --workload vit
python -m benchmarks.kernels --workload lstm --rewrites off --top 20

`benchmarks.profile` times each operation alone. This module traces the whole program while it runs.
For a product that runs in parallel with others, the trace may have only the time to start it. The
sum of the kernels is then less than the time of the step. For a step of your own, call
`kernels(step, state, batch)`.

python -m benchmarks.kernels --graphs cuda:h100

This compiles programs of one step and of 32 steps for a GPU that need not be there, and counts
their kernels, loops and CUDA graphs, by default and with each setting of `benchmarks.gpu`. Nothing
is measured.
The text of a target configuration, which the part "device" of `benchmarks.gpu` prints, is read from
a file: `--graphs h100.pbtxt`. Without the device, algorithms are not tuned: the kernels may differ.
"""

import argparse
import collections
import json
import os
import pathlib
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

os.environ.setdefault("KERAS_BACKEND", "jax")

import jax
import numpy as np
from rich import box
from rich.table import Table

import functrain as ft
from benchmarks import report
from functrain.common import _hlo, _table
from functrain.common._platform import compiling_for

# Steps in the program.
K = 2
HOLD_OTHERS = {"while", "call", "conditional"}
NO_WORK = {"parameter", "constant", "broadcast", "bitcast", "tuple", "get-tuple-element", "iota"}
COMPUTATION = re.compile(r"^(?:ENTRY )?%?([\w.-]+) \(.*\{$")
INSTRUCTION = re.compile(r"^\s+(?:ROOT )?%?([\w.-]+) = (\(.*?\)|\S+) ([\w-]+)\(")
# Steps in the longer one of the programs that `--graphs` compiles.
K_OF_GRAPHS = 32
# XLA lists what the host starts as `003: kKernel ...`, and indents what loops and graphs contain.
LISTED = re.compile(r"^( *)\d+: k(\w+)")
# A loop of known length, as here, does not compute its condition.
CONDITION = re.compile(r"^ *condition:\n.*?(?=^ *body:)", re.MULTILINE | re.DOTALL)


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


def graphs(name: str, target: ft.Target) -> Iterator[list[Any]]:
    """Yields the kernels, loops and CUDA graphs of the programs of a workload.

    Each row has the workload, the program, its kernels a step, its loops, its CUDA graphs, and what
    the host starts in a step: kernels, copies and graphs.
    """
    for program, k, lowered in _lowered(name, target):
        with tempfile.TemporaryDirectory() as folder:
            text = lowered.compile(compiler_options={"xla_dump_to": folder}).as_text()
            # Only a program with graphs has the second list, `*.thunk_sequence_after_*.txt`.
            listing = max(pathlib.Path(folder).glob("*.thunk_sequence*.txt")).read_text()
        runs = [(x.opcode, times) for x, times in _hlo.instructions(text)]
        count = sum(times for opcode, times in runs if opcode in _hlo.KERNELS)
        loops = sum(opcode == "while" for opcode, _ in runs)
        yield [name, program, count / k, loops, *starts(listing, k)]


def _lowered(name: str, target: ft.Target) -> Iterator[tuple[str, int, Any]]:
    """Yields programs of a workload, and how many steps they have: fused, and written by hand."""
    from benchmarks.jax_ways import by_hand, functrain_parts
    from benchmarks.workloads import WORKLOADS

    workload, k = WORKLOADS[name], K_OF_GRAPHS
    (state, step), (carry, by_hand_step) = functrain_parts(workload), by_hand(workload)
    batch = target.shapes(workload.make_data(workload.batch))
    state, carry = target.shapes(step.start(state)), target.shapes(carry)

    def chunk(k: int) -> Any:
        return target.shapes(
            jax.tree.map(lambda x: jax.ShapeDtypeStruct((k, *x.shape), x.dtype), batch)
        )

    def single(carry: Any, batch: Any) -> Any:
        return by_hand_step(carry, batch), None

    def scan(carry: Any, chunk: Any) -> Any:
        return jax.lax.scan(single, carry, chunk)

    with compiling_for(target.platform):
        yield "fused 1", 1, ft.fuse(step, 1).lower(state, chunk(1), 1)
        yield "jitted step", 1, jax.jit(single, donate_argnums=0).lower(carry, batch)
        yield f"fused {k}", k, ft.fuse(step, k).lower(state, chunk(k), k)
        yield f"scan {k} by hand", k, jax.jit(scan, donate_argnums=0).lower(carry, chunk(k))


def starts(listing: str, k: int) -> tuple[int, float]:
    """Returns the CUDA graphs in a list of XLA, and how much the host starts in each of k steps.

    A graph is started as one, with the loops that it contains. What a loop contains is started in
    each of its k rounds.
    """
    found, started = 0, 0
    above: list[tuple[int, str]] = []
    for match in filter(None, map(LISTED.match, CONDITION.sub("", listing).splitlines())):
        indentation, kind = len(match[1]), match[2]
        above = [each for each in above if each[0] < indentation]
        around = {kind for _, kind in above}
        above.append((indentation, kind))
        found += kind == "CommandBuffer"
        if kind != "While" and "CommandBuffer" not in around:
            started += k if "While" in around else 1
    return found, started / k


def graphs_table(target: str) -> str:
    """Returns a table of `graphs` for each setting, whose flags XLA reads once in a process."""
    from benchmarks.gpu import FLAGS

    settings = {"default": "", **FLAGS}
    cells: dict[tuple[str, ...], dict[str, str]] = {}
    for setting, flags in settings.items():
        environment = {**os.environ, "JAX_PLATFORMS": "cpu", "XLA_FLAGS": flags}
        command = [sys.executable, "-m", "benchmarks.kernels", "--rows", "--graphs", target]
        done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True)
        for name, program, count, loops, found, started in map(
            json.loads, done.stdout.splitlines()
        ):
            row = cells.setdefault((name, program, f"{count:.1f}", str(loops)), {})
            row[setting] = f"{found}, {started:.1f}"
    table = Table(box=box.MARKDOWN)
    for heading in ("model", "program", "kernels a step", "loops", *settings):
        table.add_column(heading, no_wrap=True)
    for first, row in cells.items():
        # The compiler fails without the device if loops may be in graphs with what they copy.
        table.add_row(*first, *(row.get(setting, "?") for setting in settings))
    return f"CUDA graphs, and what the host starts in a step:\n\n{_table.render(table)}"


def print_rows(target: str) -> None:
    """Prints each row of `graphs` as a line of JSON."""
    from benchmarks.gpu_parts import WORKLOADS

    is_file = pathlib.Path(target).is_file()
    found = ft.target(pathlib.Path(target).read_text() if is_file else target)
    for name in WORKLOADS:
        for row in graphs(name, found):
            print(json.dumps(row), flush=True)


def main(arguments: Sequence[str] | None = None) -> None:
    """Runs the command line."""
    from benchmarks.profile import example
    from benchmarks.workloads import WORKLOADS

    parser = report.parser("benchmarks.kernels", __doc__)
    parser.add_argument("--workload", choices=WORKLOADS, default="vit")
    parser.add_argument("--rewrites", choices=("auto", "exact", "off"), default="auto")
    parser.add_argument("--top", type=int, default=30, help="rows to show")
    parser.add_argument("--graphs", metavar="TARGET", help="count the CUDA graphs of programs")
    parser.add_argument("--rows", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args(arguments)
    if args.graphs:
        if args.rows:
            print_rows(args.graphs)
        else:
            print(graphs_table(args.graphs))
        return
    print(table(kernels(*example(WORKLOADS[args.workload]), rewrites=args.rewrites), args.top))


if __name__ == "__main__":
    main()
