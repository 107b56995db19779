"""What saving costs: a small run that saves often, and a large state that is saved once.

python -m benchmarks.saving                 # both, some three minutes on two CPU cores
python -m benchmarks.saving --gigabytes 4
"""

import argparse
import os
import pathlib
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from rich.console import Console
from rich.table import Table

os.environ.setdefault("KERAS_BACKEND", "jax")  # the workloads import keras

import jax
import numpy as np
from orbax.checkpoint import v1 as ocp

import functrain as ft
from benchmarks.jax_ways import functrain_parts
from benchmarks.workloads import WORKLOADS

EVERY = 100  # steps
EPOCHS = 20  # of a round, so that what goes on behind a run's back is in its own time
ROUNDS = 5


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command line; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--gigabytes", type=float, default=1.0, help="of the large state")
    parser.add_argument("--folder", type=pathlib.Path, help="where to write; the disk matters")
    args = parser.parse_args(arguments)
    console = Console()
    with tempfile.TemporaryDirectory(dir=args.folder, ignore_cleanup_errors=True) as folder:
        console.print(small_run(pathlib.Path(folder)))
        console.print(large_state(pathlib.Path(folder), args.gigabytes))
    return 0


def small_run(folder: pathlib.Path) -> Table:
    """The MNIST MLP, whose 100 steps take some 10 ms: saved never, within a budget, and always."""
    workload = WORKLOADS["mnist-mlp"]
    state, step = functrain_parts(workload)
    loader = ft.ArrayLoader(workload.data(), workload.batch)

    def epochs(name: str, **how: Any) -> Iterator[int]:
        """Runs on and on; yields after each round how many checkpoints were written."""
        known: dict[str, Any] = {}
        if how:
            saved = ft.Checkpointer(folder / name, every=ft.every(steps=EVERY), **how)
            known["checkpointer"] = saved
        ended, due = 0, 0
        for event in ft.run(state, step, loader, epochs=10**9, fuse=EVERY, **known):
            due += isinstance(event, ft.ChunkEnd) and event.step % EVERY == 0
            ended += isinstance(event, ft.EpochEnd)
            if ended == EPOCHS:
                jax.block_until_ready(event.state)
                yield due - (saved.left_out if how else due)
                ended = 0

    ways = {
        "not at all": epochs("never"),
        "budget=0.1": epochs("budget", budget=0.1),
        "all that are due": epochs("all", keep=3),
    }
    for way in ways.values():
        next(way)
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    written: dict[str, int] = {}
    for _ in range(ROUNDS):
        for name, way in ways.items():
            began = time.perf_counter()
            written[name] = next(way)
            seconds[name].append(time.perf_counter() - began)
    rounds = ROUNDS + 1
    due = EPOCHS * workload.steps // EVERY
    table = Table("saved", "ms / 100 steps", "relative", "checkpoints / 1000 steps")
    for name, found in seconds.items():
        ratios = [a / b for a, b in zip(found, seconds["not at all"], strict=True)]
        table.add_row(
            name,
            f"{1e3 * statistics.median(found) / due:.1f}",
            f"{statistics.median(ratios):.2f}",
            f"{10 * written[name] / (rounds * due):.2f}",
        )
    return table


def large_state(folder: pathlib.Path, gigabytes: float) -> Table:
    """How long training stands still for a state of some size: ours, Orbax's own, and a copy."""
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
    whole: dict[str, list[float]] = {name: [] for name in ways}
    for i in range(ROUNDS):
        for name, way in ways.items():
            jax.block_until_ready(tree)
            to = folder / f"{name.split('.')[0].split()[0]}{i}"
            began = time.perf_counter()
            rest = way(tree, to)
            waited[name].append(time.perf_counter() - began)
            tree = step(tree)  # training goes on, and takes the buffers over
            rest()
            whole[name].append(time.perf_counter() - began)
            shutil.rmtree(to, ignore_errors=True)
    table = Table(f"{gigabytes:g} GiB", "training waits, s", "until it is written, s")
    for name in ways:
        table.add_row(
            name,
            f"{statistics.median(waited[name]):.3f}",
            "" if name.startswith("a copy") else f"{statistics.median(whole[name]):.1f}",
        )
    return table


if __name__ == "__main__":
    sys.exit(main())
