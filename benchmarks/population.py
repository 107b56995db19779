"""Compares a population with other ways to train many models.

The other ways are one model after another, a vmap by hand, Keras, and several processes.

python -m benchmarks.population                # about ten minutes on two CPU cores
python -m benchmarks.population --quick
"""

import concurrent.futures
import multiprocessing
import os
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

from rich.table import Table

# The workloads import Keras, which reads the backend when it is imported.
os.environ.setdefault("KERAS_BACKEND", "jax")

import bridge
import functrain as ft
import jax
import jax.numpy as jnp
import keras
import optax
from jax.sharding import NamedSharding, PartitionSpec
from benchmarks import report
from benchmarks.jax_ways import adam
from benchmarks.workloads import WORKLOADS, Workload

Way = Callable[[], None]

# Workload, members, steps of a round.
CASES = (("digits-mlp", 32, 512), ("mnist-mlp", 32, 128), ("mnist-convnet", 16, 8))
QUICK = (("digits-mlp", 8, 128), ("mnist-convnet", 4, 4))
PROCESSES = 2
DEVICES = 2


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command line; returns the exit status."""
    parser = report.parser("benchmarks.population", __doc__)
    parser.add_argument("--rounds", type=int, default=7, help="default 7; 2 with --quick")
    parser.add_argument("--quick", action="store_true", help="fewer and smaller workloads")
    report.add_output(parser)
    args = parser.parse_args(arguments)
    # One of the ways divides the members among several CPU devices.
    jax.config.update("jax_num_cpu_devices", DEVICES)
    tables = []
    for name, members, steps in QUICK if args.quick else CASES:
        title = f"{members} × {name}"
        table = Table("way", "µs / member-step", "relative", title=title)
        rows = measured(WORKLOADS[name], members, steps, 2 if args.quick else args.rounds)
        for way, (microseconds, ratio) in rows.items():
            table.add_row(way, report.milliseconds(microseconds / 1e3), f"{ratio:.2f}")
        tables.append(table)
    report.publish("population", tables, args.output)
    return 0


def measured(
    workload: Workload, members: int, steps: int, rounds: int
) -> dict[str, tuple[float, float]]:
    """Returns the median µs per member and step of each way, absolute and relative.

    The ratios are relative to the first way, which trains one fused model after another. The ways
    take turns in each round, so that a slow moment of the machine affects all of them.
    """
    count = members * steps
    durations: dict[str, list[float]] = {}
    everything = ways(workload, members, steps)
    # The first round compiles and is not counted.
    for i in range(rounds + 1):
        for name, run in everything.items():
            start = time.perf_counter()
            run()
            if i:
                durations.setdefault(name, []).append((time.perf_counter() - start) / count * 1e6)
    first = next(iter(durations.values()))
    return {
        name: (
            statistics.median(times),
            statistics.median(a / b for a, b in zip(times, first, strict=True)),
        )
        for name, times in durations.items()
    }


def ways(workload: Workload, members: int, steps: int) -> dict[str, Way]:
    """Returns the ways by name; each trains all members for `steps` steps."""
    net, state, step, batches = parts(workload, steps)
    stacked = ft.population.stack([state] * members)
    over_all = ft.population.step(step)
    # The block size that "auto" does not choose for this workload.
    other = None if "conv" in workload.name else 1
    x, y = workload.make_data(steps * workload.batch)
    loader = ft.ArrayLoader((x, y), workload.batch)
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    net.compile("adam", loss, jit_compile=True)
    pool = started_pool(workload.name, steps)
    bound = started_pool(workload.name, steps, members // PROCESSES)
    alone = ft.fuse(step, steps)

    def one_after_another() -> None:
        for _ in range(members):
            train(alone, state, batches)

    def keras_fit() -> None:
        for _ in range(members):
            net.fit(x, y, batch_size=workload.batch, shuffle=False, verbose=0)

    def fused(over_all: Any) -> Way:
        program = ft.fuse(over_all, steps)
        return lambda: train(program, stacked, batches)

    mesh = ft.sharding.mesh({"members": -1})
    divided = jax.device_put(stacked, NamedSharding(mesh, PartitionSpec("members")))
    everywhere = jax.device_put(batches, NamedSharding(mesh, PartitionSpec()))
    on_devices = ft.fuse(ft.population.step(step), steps)

    @jax.jit
    def by_hand(states: Any, batches: Any) -> Any:
        return jax.lax.scan(jax.vmap(step, in_axes=(0, None)), states, batches)

    return {
        "one after another, each fused": one_after_another,
        "population, fused": fused(over_all),
        f"population, block={other}": fused(ft.population.step(step, block=other)),
        f"population over {DEVICES} devices, fused": lambda: train(on_devices, divided, everywhere),
        "population, ft.fit": lambda: ft.fit(stacked, over_all, loader, verbose=0),
        "by hand: jit(scan(vmap))": lambda: train(by_hand, stacked.states, batches),
        "Keras fit in a loop": keras_fit,
        f"{PROCESSES} processes, each fused": lambda: list(pool.map(_train, range(members))),
        f"population over {PROCESSES} processes, each bound to its cores": lambda: list(
            bound.map(_train, range(PROCESSES))
        ),
    }


def parts(workload: Workload, steps: int) -> tuple[Any, Any, Any, Any]:
    """Returns the Keras model, its state, its step, and the batches of a round."""
    data = workload.make_data(steps * workload.batch)
    batches = jax.tree.map(
        lambda a: jnp.asarray(a).reshape(steps, workload.batch, *a.shape[1:]), data
    )
    net = workload.model()
    loss = optax.softmax_cross_entropy_with_integer_labels
    step = ft.train_step(ft.supervised(bridge.from_keras(net), loss), adam())
    return net, bridge.create_state(net, adam()), step, batches


def train(program: Any, state: Any, batches: Any) -> None:
    """Runs a program on a copy of the state, because the program may donate its buffers."""
    jax.block_until_ready(program(jax.tree.map(jnp.copy, state), batches))


_of_process: tuple[Any, Any, Any] = (None, None, None)


def started_pool(
    name: str, steps: int, members: int | None = None
) -> concurrent.futures.ProcessPoolExecutor:
    """Returns a pool of processes that prepare the workload and compile it at the first call.

    With `members`, each process has a population of that size, and is bound to its own part of the
    cores, like processes that `functrain.launch --bind` starts.
    """
    context = multiprocessing.get_context("spawn")
    numbers = context.SimpleQueue()
    for number in range(PROCESSES):
        numbers.put(number)
    return concurrent.futures.ProcessPoolExecutor(
        PROCESSES,
        mp_context=context,
        initializer=_prepare,
        initargs=(name, steps, members, numbers),
    )


def _prepare(name: str, steps: int, members: int | None, numbers: Any) -> None:
    global _of_process
    # The process is bound before JAX starts its threads, which inherit the binding.
    if members is not None:
        cores = sorted(os.sched_getaffinity(0))
        os.sched_setaffinity(0, cores[numbers.get() :: PROCESSES])
    _, state, step, batches = parts(WORKLOADS[name], steps)
    if members is not None:
        state, step = ft.population.stack([state] * members), ft.population.step(step)
    _of_process = ft.fuse(step, steps), state, batches


def _train(_: int) -> None:
    train(*_of_process)


if __name__ == "__main__":
    sys.exit(main())
