"""Measures what each rewrite for CPUs gains, and how good the choice among them is.

python -m benchmarks.rewrites leave-one-out                  # some 30 minutes on two idle cores
python -m benchmarks.rewrites leave-one-out --workloads dcgan,volume
python -m benchmarks.rewrites regret --layers 140            # 15 minutes or more
python -m benchmarks.rewrites regret --layers 140 --first 1000 --update

`leave-one-out` compiles the fused step of each workload with all rewrites, and without each of
those that apply. A rewrite should gain 5 % of a step of some workload; otherwise it can be deleted.

`regret` measures convolution layers that are drawn at random: see `benchmarks.regret`.

In both, the programs take turns.
"""

import functools
import math
import os
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple
from unittest import mock

os.environ.setdefault("KERAS_BACKEND", "jax")

import jax
import keras
import numpy as np
from keras import layers
from rich.table import Table

import functrain as ft
from benchmarks import regret, report
from benchmarks.profile import example
from benchmarks.workloads import WORKLOADS, Workload, mlp, noise
from functrain.rewrites import _optimize

ROUNDS = 15
# Seconds of one measurement, in which a program runs several steps.
SECONDS = 0.08
# Rules that are one rewrite in several parts.
PARTS = {"argmin": "argmax"}


def volume() -> keras.Model:
    """Returns a convnet of 3-D images."""
    inputs = keras.Input((16, 16, 16, 4))
    x = layers.Conv3D(16, 3, padding="same", activation="relu")(inputs)
    x = layers.Conv3D(32, 3, strides=2, padding="same", activation="relu")(x)
    return keras.Model(inputs, layers.Dense(10)(layers.GlobalAveragePooling3D()(x)))


def grouped() -> keras.Model:
    """Returns a convnet whose convolutions have groups."""
    inputs = keras.Input((32, 32, 3))
    x = layers.Conv2D(64, 3, strides=2, padding="same", activation="relu")(inputs)
    for _ in range(2):
        x = layers.Conv2D(64, 3, padding="same", groups=8, activation="relu")(x)
    return keras.Model(inputs, layers.Dense(10)(layers.GlobalAveragePooling2D()(x)))


SMALL_WORKLOADS = (
    Workload("volume", 8, 8, volume, noise(16, 16, 16, 4)),
    Workload("grouped", 16, 8, grouped, noise(32, 32, 3)),
    Workload("thousand-classes", 256, 8, mlp(64, 128, 1000), noise(64, classes=1000)),
)
EXAMPLES: dict[str, Callable[[], tuple[Any, Any, Any]]] = {
    each.name: functools.partial(example, each) for each in (*SMALL_WORKLOADS, *WORKLOADS.values())
}


class Gain(NamedTuple):
    """What a rewrite gains in a workload.

    Attributes:
      workload: The name of the workload.
      rewrite: The name of the rewrite.
      ratio: The time of a step without the rewrite over that with all rewrites, the median of the
        rounds' ratios.
    """

    workload: str
    rewrite: str
    ratio: float


def leave_one_out(name: str) -> list[Gain]:
    """Returns the gain of each rewrite that applies to the step of a workload."""
    step, state, batch = EXAMPLES[name]()
    rows = ft.inspect.explain_rewrites(step, state, batch).rows
    rewrites = sorted({PARTS.get(row.rule, row.rule) for row in rows} - {""})
    steps = 2
    run = _compile_without("", step, state, batch, steps)
    steps = min(256, max(2, math.ceil(SECONDS / regret.seconds_of(run) * steps)))
    runs = {each: _compile_without(each, step, state, batch, steps) for each in ("", *rewrites)}
    times: dict[str, list[float]] = {each: [] for each in runs}
    for _ in range(ROUNDS):
        for each, run in runs.items():
            times[each].append(regret.seconds_of(run))
    ratios = {each: np.median(np.divide(times[each], times[""])) for each in rewrites}
    return [Gain(name, each, float(ratio)) for each, ratio in ratios.items()]


def _compile_without(
    left_out: str, step: Any, state: Any, batch: Any, steps: int
) -> Callable[[], None]:
    """Returns a program of several steps that lacks a rewrite, after a first run."""
    kept = [rule for rule in _optimize.REWRITES if PARTS.get(rule.name, rule.name) != left_out]
    chunk = jax.tree.map(lambda x: np.stack([np.asarray(x)] * steps), batch)
    args = state, chunk, np.int32(steps)
    # Otherwise jax would find the program with the other rules.
    jax.clear_caches()
    with mock.patch.object(_optimize, "REWRITES", tuple(kept)):
        program = ft.fuse(step, steps, donate=False).lower(*args).compile()

    def run() -> None:
        jax.block_until_ready(program(*args))

    run()
    return run


def _table_of_gains(gains: Sequence[Gain]) -> Table:
    table = Table(title="Time of a step without a rewrite, relative to all rewrites")
    for name in ("rewrite", "most", "workloads"):
        table.add_column(name)
    for name in sorted({gain.rewrite for gain in gains}):
        own = sorted((gain for gain in gains if gain.rewrite == name), key=lambda gain: -gain.ratio)
        workloads = ", ".join(f"{gain.workload} {gain.ratio:.2f}" for gain in own)
        table.add_row(name, f"{own[0].ratio:.2f}", workloads)
    return table


def main(argv: Sequence[str] | None = None) -> None:
    """Runs one of the two commands."""
    parser = report.parser("benchmarks.rewrites", __doc__)
    parser.add_argument("command", choices=["leave-one-out", "regret"])
    parser.add_argument("--workloads", help="comma-separated; default: all")
    parser.add_argument("--layers", type=int, default=140, help="the number of layers")
    parser.add_argument("--first", type=int, default=0, help="the seed of the first layer")
    report.add_output(parser)
    args = parser.parse_args(argv)
    if args.command == "leave-one-out":
        names = args.workloads.split(",") if args.workloads else list(EXAMPLES)
        gains = []
        for name in names:
            of_workload = leave_one_out(name)
            for gain in of_workload:
                print(f"{name} without {gain.rewrite}: {gain.ratio:.3f}", flush=True)
            gains += of_workload
        report.publish("rewrites", [_table_of_gains(gains)], args.output)
        return
    measured = regret.measure_layers(range(args.first, args.first + args.layers))
    report.publish("regret", [regret.summarize(measured)], args.output)


if __name__ == "__main__":
    main()
