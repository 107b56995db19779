"""Measures the cost of saving: a small run that saves often, and a large state saved once.

python -m benchmarks.saving                 # both, about three minutes on two CPU cores
python -m benchmarks.saving --gigabytes 4
python -m benchmarks.saving --memory        # peak memory, each in a new process
"""

import argparse
import os
import pathlib
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from rich.table import Table

# The workloads import Keras, which reads the backend when it is imported.
os.environ.setdefault("KERAS_BACKEND", "jax")

import jax
import jax.numpy as jnp
import numpy as np
import optax
from orbax.checkpoint import v1 as ocp

import functrain as ft
from benchmarks import report
from benchmarks.jax_ways import functrain_parts
from benchmarks.workloads import WORKLOADS

# Steps between two checkpoints.
EVERY = 100
# Epochs in a round. A round is long, so that background writes count towards the round that started
# them.
EPOCHS = 20
ROUNDS = 5
PEAKS = "by hand", "fit", "fit, saved", "fit donated", "fit donated, saved", "restore"


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command line; returns the exit status."""
    parser = report.parser("benchmarks.saving", __doc__)
    parser.add_argument("--gigabytes", type=float, default=1.0, help="size of the large state")
    parser.add_argument("--folder", type=pathlib.Path, help="where to write; the disk matters")
    parser.add_argument("--memory", action="store_true", help="measure peaks, not times")
    # With --memory the script starts itself with --peak, in a new process for each measurement.
    parser.add_argument("--peak", choices=PEAKS, help=argparse.SUPPRESS)
    report.add_output(parser)
    args = parser.parse_args(arguments)
    if args.peak:
        print(peak(args.peak))
        return 0
    if args.memory:
        report.publish("saving-memory", [peaks()], args.output)
        return 0
    with tempfile.TemporaryDirectory(dir=args.folder, ignore_cleanup_errors=True) as folder:
        tables = [
            small_run(pathlib.Path(folder)),
            large_state(pathlib.Path(folder), args.gigabytes),
        ]
    report.publish("saving", tables, args.output)
    return 0


def small_run(folder: pathlib.Path) -> Table:
    """Times the MNIST MLP without saving, and saving often.

    Its 100 steps between checkpoints take about 10 ms, so saving is expensive in comparison.
    """
    workload = WORKLOADS["mnist-mlp"]
    state, step = functrain_parts(workload)
    loader = ft.ArrayLoader(workload.data(), workload.batch)

    def epochs(checkpointer: ft.Checkpointer | None = None) -> Iterator[int]:
        """Trains without end; yields the number of checkpoints written after each round."""
        ended, due = 0, 0
        run = ft.run(state, step, loader, epochs=10**9, fuse=EVERY, checkpointer=checkpointer)
        for event in run:
            due += isinstance(event, ft.events.ChunkEnd) and event.step % EVERY == 0
            ended += isinstance(event, ft.events.EpochEnd)
            if ended == EPOCHS:
                jax.block_until_ready(event.state)
                yield 0 if checkpointer is None else due
                ended = 0

    ways = {
        "not at all": epochs(),
        "all that are due": epochs(ft.Checkpointer(folder / "run", every=ft.every(steps=EVERY))),
    }
    for way in ways.values():
        next(way)
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    written: dict[str, int] = {}
    for _ in range(ROUNDS):
        for name, way in ways.items():
            start = time.perf_counter()
            written[name] = next(way)
            seconds[name].append(time.perf_counter() - start)
    rounds = ROUNDS + 1
    due = EPOCHS * workload.steps // EVERY
    table = Table("saved", "ms / 100 steps", "relative", "checkpoints / 1000 steps")
    for name, durations in seconds.items():
        ratios = [a / b for a, b in zip(durations, seconds["not at all"], strict=True)]
        table.add_row(
            name,
            f"{1e3 * statistics.median(durations) / due:.1f}",
            f"{statistics.median(ratios):.2f}",
            f"{10 * written[name] / (rounds * due):.2f}",
        )
    return table


def large_state(folder: pathlib.Path, gigabytes: float) -> Table:
    """Times how long training waits for a large state to be saved, compared with Orbax."""
    parts = 16
    size = int(gigabytes * 2**30 / 4 / parts)
    keys = jax.random.split(jax.random.key(0), parts)
    tree = {f"part{i}": jax.random.normal(key, (size,)) for i, key in enumerate(keys)}
    step = jax.jit(lambda tree: jax.tree.map(lambda x: x + 1, tree), donate_argnums=0)
    tree = step(jax.block_until_ready(tree))

    def ours(tree: Any, to: pathlib.Path) -> Callable[[], None]:
        checkpointer = ft.Checkpointer(to)
        checkpointer.save(tree, 1, wait=False)
        return checkpointer.close

    def orbaxs(tree: Any, to: pathlib.Path) -> Callable[[], None]:
        return ocp.training.Checkpointer(to).save_checkpointables_async(1, {"x": tree}).result

    def copy(tree: Any, to: pathlib.Path) -> Callable[[], None]:
        copied = jax.tree.map(np.array, tree)
        return lambda: copied.clear()

    ways = {"functrain.Checkpointer": ours, "Orbax's Checkpointer": orbaxs, "a copy by NumPy": copy}
    waited: dict[str, list[float]] = {name: [] for name in ways}
    written: dict[str, list[float]] = {name: [] for name in ways}
    for i in range(ROUNDS):
        for name, way in ways.items():
            jax.block_until_ready(tree)
            to = folder / f"{name.split('.')[0].split()[0]}{i}"
            start = time.perf_counter()
            rest = way(tree, to)
            waited[name].append(time.perf_counter() - start)
            # The next training step reuses the buffers, as in a real run.
            tree = step(tree)
            rest()
            written[name].append(time.perf_counter() - start)
            shutil.rmtree(to, ignore_errors=True)
    table = Table(f"{gigabytes:g} GiB", "training waits, s", "until it is written, s")
    for name in ways:
        table.add_row(
            name,
            f"{statistics.median(waited[name]):.3f}",
            "" if name.startswith("a copy") else f"{statistics.median(written[name]):.1f}",
        )
    return table


def peaks(rounds: int = 3) -> Table:
    """Returns the peak memory in multiples of the state, without the process's memory before it."""
    table = Table("a state of 588 MiB", *(f"round {i + 1}" for i in range(rounds)))
    for way in PEAKS:
        command = [sys.executable, "-m", "benchmarks.saving", "--peak", way]
        runs = [subprocess.run(command, check=True, capture_output=True) for _ in range(rounds)]
        table.add_row(way, *(f"{float(run.stdout.split()[-1]):.2f}" for run in runs))
    return table


def peak(way: str) -> float:
    """Returns the peak memory of one way in this process, in multiples of the state (Linux)."""
    status, tx = pathlib.Path("/proc/self/status"), optax.adam(1e-4)

    def mib(name: str) -> float:
        return int(status.read_text().split(name + ":")[1].split()[0]) / 2**10

    def create() -> ft.TrainState:
        shapes = [(512, 2048), *[(2048, 2048)] * 12]
        return ft.TrainState.create(params=[jnp.full(s, 1e-3) for s in shapes], tx=tx)

    def loss_fn(params: Any, model_state: Any, x: Any, *, rng: Any, training: bool) -> Any:
        for w in params:
            x = jnp.tanh(x @ w)
        return jnp.mean(x**2), ft.Aux(model_state)

    step, loader = ft.train_step(loss_fn, tx), ft.ArrayLoader(np.ones((16, 512), np.float32), 4)
    with tempfile.TemporaryDirectory() as folder:
        checkpointer = ft.Checkpointer(folder, keep=1) if "save" in way else None
        before = mib("VmRSS")
        state = jax.block_until_ready(jax.jit(create)())
        size = sum(x.nbytes for x in jax.tree.leaves(state)) / 2**20
        if way == "by hand":
            by_hand = jax.jit(step, donate_argnums=0)
            for _ in range(20):
                state, _ = jax.block_until_ready(by_hand(state, np.ones((4, 512), np.float32)))
        elif way == "restore":
            ft.save(f"{folder}/state", state)
            del state
            pathlib.Path("/proc/self/clear_refs").write_text("5")
            before = mib("VmRSS")
            ft.load(f"{folder}/state", jax.eval_shape(create))
        else:
            donate = "donated" in way
            ft.fit(
                state, step, loader, epochs=5, donate=donate, checkpointer=checkpointer, verbose=0
            )
        return float((mib("VmHWM") - before) / size)


if __name__ == "__main__":
    sys.exit(main())
