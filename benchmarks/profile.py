"""Times the operations of a step, and compares their rates with a matrix product.

python -m benchmarks.profile --workload mnist-convnet
python -m benchmarks.profile --workload resnet50 --rewrites off --top 20

Every operation is timed alone, in a loop, after the rewrites. The sum of these times differs from
the time of the step, in which operations overlap and are fused. For a step of your own, call
`profile(step, state, batch)`.
"""

import dataclasses
import os
import pathlib
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

os.environ.setdefault("KERAS_BACKEND", "jax")

import jax
import numpy as np
from rich import box
from rich.table import Table

import functrain as ft
from benchmarks import report
from benchmarks.operations import Operation, dense_rate, least, operations, seconds
from benchmarks.report import milliseconds
from functrain.common import _table


@dataclasses.dataclass(frozen=True)
class Profile:
    """The times of a step and of its operations; `str` returns them as a table.

    Attributes:
      operations: The operations; those that take most of a step come first.
      times: Seconds of one evaluation of each operation.
      step: Seconds of a step in a fused program.
      dense: FLOP/s of a matrix product.
      top: The number of rows in the table.
    """

    operations: tuple[Operation, ...]
    times: tuple[float, ...]
    step: float
    dense: float
    top: int = 30

    def __str__(self) -> str:
        table = Table(box=box.MARKDOWN)
        table.add_column("operation")
        for heading in ("count", "ms each", "ms a step", "of the step", "rate", "of dense"):
            table.add_column(heading, justify="right", no_wrap=True)
        table.add_column("rewritten by")
        rows = list(zip(self.operations, self.times, strict=True))
        for operation, duration in rows[: self.top]:
            table.add_row(*self._row(operation, duration))
        total = sum(o.count * duration for o, duration in rows)
        left = sum(o.count * duration for o, duration in rows[self.top :])
        return (
            f"{_table.render(table)}\n\n"
            f"A step takes {milliseconds(self.step)} ms. Timed alone, its {len(rows)} kinds of "
            f"operations take {milliseconds(total)} ms in sum, {milliseconds(left)} ms of this in "
            "rows that are not shown. Fused operations are not included. "
            f"Dense: {self.dense / 1e9:.0f} GFLOP/s."
        )

    def _row(self, operation: Operation, duration: float) -> list[str]:
        seconds_per_step = operation.count * duration
        flops = operation.flops / duration
        rate = (
            f"{flops / 1e9:.3g} GFLOP/s"
            if flops
            else f"{operation.nbytes / duration / 1e9:.3g} GB/s"
        )
        return [
            describe(operation.eqn),
            str(operation.count),
            milliseconds(duration),
            milliseconds(seconds_per_step),
            f"{seconds_per_step / self.step:.1%}",
            rate,
            f"{flops / self.dense:.1%}" if flops else "",
            operation.rule,
        ]


def profile(
    step: ft.Step[Any],
    state: Any,
    batch: Any,
    *,
    rewrites: Any = "auto",
    top: int = 30,
    say: Callable[[str], None] = lambda text: None,
) -> Profile:
    """Times a step in a fused program, and each of its operations alone.

    Args:
      step: ``(state, batch) -> (state, logs)``; one with metrics takes ``step.start(state)``.
      state: The state, which is not donated.
      batch: One batch.
      rewrites: As for `functrain.fuse`.
      top: The number of rows in the table.
      say: A function that is called with the progress as text.

    Returns:
      A Profile, which can be printed.
    """
    step_operations = operations(step, state, batch, rewrites)
    dense, times = dense_rate(), []
    for i, operation in enumerate(step_operations):
        say(f"{i + 1} of {len(step_operations)}: {describe(operation.eqn)}")
        times.append(seconds(operation, rewrites))
    order = sorted(range(len(step_operations)), key=lambda i: -times[i] * step_operations[i].count)
    return Profile(
        operations=tuple(step_operations[i] for i in order),
        times=tuple(times[i] for i in order),
        step=step_seconds(step, state, batch, rewrites),
        dense=max(dense, dense_rate()),
        top=top,
    )


def step_seconds(step: ft.Step[Any], state: Any, batch: Any, rewrites: Any, k: int = 2) -> float:
    """Returns the seconds of a step in a fused program, the minimum of several runs."""
    fused = ft.fuse(step, k, rewrites=rewrites, donate=False)
    chunk = jax.tree.map(lambda x: np.stack([np.asarray(x)] * k), batch)

    def run() -> float:
        start = time.perf_counter()
        jax.block_until_ready(fused(state, chunk))
        return (time.perf_counter() - start) / k

    run()
    return least(run)


def describe(eqn: Any) -> str:
    """Returns the primitive, the types and the important parameters of an equation."""
    types = " ".join(var.aval.str_short(short_dtypes=True) for var in eqn.invars)
    out = eqn.outvars[0].aval.str_short(short_dtypes=True)
    return f"{eqn.primitive.name} {types} -> {out}{_parameters(eqn.params)}"


def _parameters(params: dict[str, Any]) -> str:
    short = {
        "window_strides": "strides",
        "lhs_dilation": "zeros between",
        "rhs_dilation": "dilation",
        "feature_group_count": "groups",
        "batch_group_count": "batch groups",
        "window_dimensions": "window",
        "axes": "axes",
    }
    named = {name: params[key] for key, name in short.items() if key in params}
    shown = {k: v for k, v in named.items() if k == "axes" or np.max(v, initial=1) > 1}
    return "".join(f", {k} {'×'.join(map(str, np.ravel(v)))}" for k, v in shown.items())


def main(arguments: Sequence[str] | None = None) -> None:
    """Runs the command line."""
    from benchmarks.workloads import WORKLOADS

    parser = report.parser("benchmarks.profile", __doc__)
    parser.add_argument("--workload", choices=WORKLOADS, default="mnist-convnet")
    parser.add_argument("--rewrites", choices=("auto", "exact", "off"), default="auto")
    parser.add_argument("--top", type=int, default=30, help="rows to show")
    parser.add_argument("--output", type=pathlib.Path, help="a file to add the table to")
    args = parser.parse_args(arguments)
    profiled = profile(
        *example(WORKLOADS[args.workload]),
        rewrites=args.rewrites,
        top=args.top,
        say=lambda text: print(text, file=sys.stderr),
    )
    print(profiled)
    if args.output:
        with args.output.open("a") as file:
            file.write(f"## {args.workload}, rewrites={args.rewrites}\n\n{profiled}\n\n")


def example(workload: Any) -> tuple[ft.Step[Any], Any, Any]:
    """Returns the step of a workload, and a state and a batch for it."""
    from benchmarks.jax_ways import functrain_parts

    state, step = functrain_parts(workload)
    carry = step.start(state) if isinstance(step, ft.MeteredStep) else state
    loader = ft.ArrayLoader(workload.make_data(workload.batch), workload.batch)
    return step, carry, loader.batch(0, 0)


if __name__ == "__main__":
    main()
