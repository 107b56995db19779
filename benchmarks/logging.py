"""Measures the cost of hooks in a training, by default that of an MNIST MLP.

python -m benchmarks.logging                # about three minutes on two CPU cores
"""

import contextlib
import importlib.util
import os
import pathlib
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from typing import Any

from rich.table import Table

# The workloads import Keras, which reads the backend when it is imported.
os.environ.setdefault("KERAS_BACKEND", "jax")

import functrain as ft
from benchmarks import report
from benchmarks.jax_ways import functrain_parts
from benchmarks.workloads import WORKLOADS

# Epochs in a round.
EPOCHS = 4
ROUNDS = 15

Hooks = Callable[[pathlib.Path], list[Any]]


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command line; returns the exit status."""
    parser = report.parser("benchmarks.logging", __doc__)
    parser.add_argument("--workload", default="mnist-mlp", choices=WORKLOADS)
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--epochs", type=int, default=EPOCHS, help="of a round")
    report.add_output(parser)
    args = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory() as folder:
        table = measured(pathlib.Path(folder), args.workload, args.rounds, args.epochs)
    report.publish("logging", [table], args.output)
    return 0


def ways() -> dict[str, Hooks]:
    """Returns the ways by name: functions from a folder to the hooks of a run."""
    of_hooks: dict[str, Hooks] = {
        "TensorBoard": lambda to: [ft.hooks.TensorBoard(to)],
        "JSONLines": lambda to: [ft.hooks.JSONLines(to / "log.jsonl")],
        "CSVLogger": lambda to: [ft.hooks.CSVLogger(to / "log.csv")],
        "TerminateOnNaN, Throughput": lambda to: [ft.hooks.TerminateOnNaN(), ft.hooks.Throughput()],
        "Goodput, Watchdog": lambda to: [ft.hooks.Goodput(), ft.hooks.Watchdog(600)],
    }

    def together(to: pathlib.Path) -> list[Any]:
        return [hook for make in of_hooks.values() for hook in make(to)]

    def with_few_rows(to: pathlib.Path) -> list[Any]:
        """Returns the same hooks, whose loggers write a row every hundredth step."""
        tensorboard = ft.hooks.TensorBoard(to, every=100)
        json_lines = ft.hooks.JSONLines(to / "log.jsonl", every=100)
        return [tensorboard, json_lines, *together(to)[2:]]

    more: dict[str, Hooks] = {
        "all of these, every=100": with_few_rows,
        "TensorBoard(every=1)": lambda to: [ft.hooks.TensorBoard(to, every=1)],
        "JSONLines(every=1)": lambda to: [ft.hooks.JSONLines(to / "log.jsonl", every=1)],
    }
    if importlib.util.find_spec("wandb"):
        more["WandB, offline"] = lambda to: [ft.hooks.WandB(mode="offline", dir=str(to))]
    return {"none": lambda to: [], **of_hooks, "all of these": together, **more}


def measured(folder: pathlib.Path, workload_name: str, rounds: int, epochs: int) -> Table:
    """Times fits with the hooks of each way, in turns: wall-clock and processor time."""
    workload = WORKLOADS[workload_name]
    state, step = functrain_parts(workload)
    loader = ft.ArrayLoader(workload.data(), workload.batch)

    def seconds(make: Hooks, to: pathlib.Path) -> tuple[float, float]:
        hooks = make(to)
        for hook in hooks:
            # This opens files, and starts the service of wandb, before the time is taken.
            getattr(hook, "begin", lambda: None)()
        clock, processor = time.perf_counter(), time.process_time()
        with contextlib.redirect_stdout(None):  # Goodput prints a line
            ft.fit(state, step, loader, epochs=epochs, hooks=hooks, verbose=0)
        return time.perf_counter() - clock, time.process_time() - processor

    durations: dict[str, list[tuple[float, float]]] = {name: [] for name in ways()}
    # The first round compiles and is not counted.
    for i in range(rounds + 1):
        for name, make in ways().items():
            values = seconds(make, folder / f"{name}{i}")
            if i:
                durations[name].append(values)
    steps = epochs * workload.steps
    table = Table("hooks", "µs / step", "relative", "processor, µs / step", "relative")
    for name, both in durations.items():
        cells = []
        for kind in (0, 1):
            values, without = ([round[kind] for round in of] for of in (both, durations["none"]))
            ratio = statistics.median(a / b for a, b in zip(values, without, strict=True))
            cells += [f"{1e6 * statistics.median(values) / steps:.3g}", f"{ratio:.2f}"]
        table.add_row(name, *cells)
    return table


if __name__ == "__main__":
    sys.exit(main())
