"""Times imports, building and the first steps in a new process, compared with Keras's fit.

python -m benchmarks.first_step                          # about ten minutes on two CPU cores
python -m benchmarks.first_step --workloads digits-mlp --rounds 3

Every measurement runs in its own process, and the ways take turns. With the cache, the programs of
an earlier run are on disk. Python's bytecode is always cached, as it is for installed packages.
"""

import json
import os
import pathlib
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence

from rich.table import Table

from benchmarks import report

ROOT = pathlib.Path(__file__).parents[1]
STEPS = 8
WORKLOADS = "digits-mlp,mnist-convnet,residual"
PARTS = ("import", "build", "first steps")

# The code of each way: its imports, the building of the model, and an epoch of training.
IMPORTS = {"functrain-fit": "bridge, functrain as ft", "bridge-fit": "bridge", "keras-fit": "keras"}
BY_FIT = "model = compiled(workload)"
BUILD = {
    "functrain-fit": "state, step = functrain_parts(workload)",
    "bridge-fit": BY_FIT,
    "keras-fit": BY_FIT,
}
MORE = "batch_size=workload.batch, shuffle=False, verbose=0"
TRAIN = {
    "functrain-fit": "ft.fit(state, step, ft.ArrayLoader((x, y), workload.batch), verbose=0)",
    "bridge-fit": f"bridge.fit(model, x, y, {MORE})",
    "keras-fit": f"model.fit(x, y, {MORE})",
}
SCRIPT = """
import json, time
began = time.perf_counter()
import {imports}
times = [time.perf_counter()]
from benchmarks.workloads import WORKLOADS
from benchmarks.{ways} import {parts}
workload = WORKLOADS[{workload!r}]
x, y = workload.make_data({steps} * workload.batch)
start = time.perf_counter()
{build}
times.append(time.perf_counter() - start)
start = time.perf_counter()
{train}
times.append(time.perf_counter() - start)
print(json.dumps([times[0] - began, *times[1:]]))
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command line; returns the exit status."""
    parser = report.parser("benchmarks.first_step", __doc__)
    parser.add_argument("--rounds", type=int, help="default 5; 1 with --quick")
    parser.add_argument("--quick", action="store_true", help="one round of the smallest workload")
    parser.add_argument("--workloads", help=f"comma-separated; default {WORKLOADS}")
    report.add_output(parser)
    args = parser.parse_args(arguments)
    workloads = args.workloads or ("digits-mlp" if args.quick else WORKLOADS)
    rounds = args.rounds or (1 if args.quick else 5)
    tables = [table(name, measured(name, rounds)) for name in workloads.split(",")]
    report.publish("first_step", tables, args.output)
    return 0


def measured(workload: str, rounds: int) -> dict[tuple[str, bool], list[list[float]]]:
    """Returns the seconds of each part and of the whole process, by way and use of the cache.

    The first round fills the caches and is not counted.
    """
    ways = [(way, cache) for cache in (False, True) for way in TRAIN]
    durations: dict[tuple[str, bool], list[list[float]]] = {way: [] for way in ways}
    with tempfile.TemporaryDirectory() as folder:
        for i in range(rounds + 1):
            for way, cache in ways:
                run_durations = run(way, workload, pathlib.Path(folder), cache)
                if i:
                    durations[way, cache].append(run_durations)
    return durations


def run(way: str, workload: str, folder: pathlib.Path, cache: bool) -> list[float]:
    """Runs one process; returns the seconds of its parts, and of the whole process."""
    script = SCRIPT.format(
        imports=IMPORTS[way],
        ways="jax_ways" if way == "functrain-fit" else "keras_ways",
        parts="functrain_parts" if way == "functrain-fit" else "compiled",
        build=BUILD[way],
        train=TRAIN[way],
        workload=workload,
        steps=STEPS,
    )
    env = {name: value for name, value in os.environ.items() if "CACHE" not in name}
    env.pop("PYTHONDONTWRITEBYTECODE", None)
    path = os.pathsep.join(filter(None, [str(ROOT), env.get("PYTHONPATH")]))
    env |= {"KERAS_BACKEND": "jax", "PYTHONPATH": path}
    env["PYTHONPYCACHEPREFIX"] = str(folder / "modules")
    if cache:
        env["JAX_COMPILATION_CACHE_DIR"] = str(folder / way)
        env["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0"
        env["JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES"] = "-1"
    start = time.perf_counter()
    done = subprocess.run(
        [sys.executable, "-c", script], env=env, stdout=subprocess.PIPE, text=True
    )
    total = time.perf_counter() - start
    if done.returncode:
        raise RuntimeError(f"{way} of {workload} failed; its messages are above")
    return [*json.loads(done.stdout.splitlines()[-1]), total]


def table(workload: str, durations: dict[tuple[str, bool], list[list[float]]]) -> Table:
    """Returns a table of the medians, and of the median ratio of the sums to those of Keras."""
    table = Table(title=f"{workload}: {STEPS} steps in a fresh process", title_justify="left")
    for column in ("way", "cache", *(f"{part}, s" for part in PARTS), "sum, s", "relative"):
        table.add_column(column, no_wrap=True)
    for (way, cache), rounds in durations.items():
        cells = [f"{statistics.median(part):.1f}" for part in list(zip(*rounds, strict=True))[:3]]
        sums, other = (
            [sum(r[:3]) for r in rows] for rows in (rounds, durations["keras-fit", cache])
        )
        ratio = statistics.median(a / b for a, b in zip(sums, other, strict=True))
        total = statistics.median(sums)
        table.add_row(way, "yes" if cache else "no", *cells, f"{total:.1f}", f"{ratio:.2f}")
    return table


if __name__ == "__main__":
    sys.exit(main())
