"""Compiles training steps for TPUs and GPUs that are not there, and reports what they cost.

python -m benchmarks.targets                # everything, an hour or two on two CPU cores
python -m benchmarks.targets --quick        # two workloads, under two minutes
python -m benchmarks.targets --targets tpu:v6e,tpu:v6e:8x8 --workloads mnist-mlp,7B

For a target of one device: a step of each workload, alone and in loops of 32 steps, and of
populations. For a target of several devices: the memory of large transformers. The estimates are
those of the compilers (`functrain[tpu]`, `functrain[cuda]`); nothing is measured.
"""

import argparse
import datetime
import importlib.metadata
import json
import os
import pathlib
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

# The workloads import Keras, which reads the backend when it is imported.
os.environ.setdefault("KERAS_BACKEND", "jax")
# The devices are not there: jax need not look for them.
os.environ.setdefault("JAX_PLATFORMS", "cpu")

import functrain as ft
import jax
from benchmarks import large_transformers, report
from benchmarks.jax_ways import functrain_parts, keras_scan
from benchmarks.keras_ways import compiled
from benchmarks.target_tables import K, Row, describe, markdown
from benchmarks.workloads import WORKLOADS
from functrain.common import _hlo
from functrain.common._platform import compiling_for

HERE = pathlib.Path(__file__).parent
TRAINED = [
    *("digits-mlp", "mnist-mlp", "tabular-mlp", "lstm", "transformer", "mnist-convnet"),
    *("bert-tiny", "vit", "dcgan", "resnet50"),
]
POPULATIONS = ["digits-mlp", "mnist-mlp"]
QUICK = POPULATIONS
MEMBERS = [1, 32, 256]
CHIPS = ["tpu:v5e", "cuda:h100"]
# Slices of TPUs, and the large transformers that are compiled for them: 7B fits the first one.
SLICES = {
    "tpu:v5e:8x8": ["7B", "70B"],
    "tpu:v6e:8x8": ["70B"],
    "tpu:v5p:4x4x4": ["70B"],
    "tpu:v5e:16x16": ["70B"],
}
DEFAULT_TARGETS = [*CHIPS, *SLICES]


def main(arguments: list[str] | None = None) -> int:
    """Runs every part in its own process, so that its memory is freed; writes the results."""
    args = parse(arguments)
    if args.part:
        part, name, target = args.part
        for row in PARTS[part](name, ft.target(target)):
            print(json.dumps({"part": part, "target": target, **row}), flush=True)
        return 0
    results: dict[str, Any] = {
        "date": datetime.date.today().isoformat(),
        "versions": versions(),
        "rows": [],
    }
    args.output.mkdir(parents=True, exist_ok=True)
    for part, name, target in planned(args.targets, args.workloads):
        for row in in_child(part, name, target):
            print(describe(row), flush=True)
            results["rows"].append(row)
        # The files are written after each part, so an interrupt loses only one of them.
        (args.output / "targets.json").write_text(json.dumps(results, indent=1) + "\n")
        (args.output / "targets.md").write_text(markdown(results))
    print(f"wrote targets.json and targets.md to {args.output}")
    return int(any("error" in row for row in results["rows"]))


def parse(arguments: list[str] | None) -> argparse.Namespace:
    """Parses the command line."""
    parser = report.parser("benchmarks.targets", __doc__)
    known = [*TRAINED, *large_transformers.SIZES]
    parser.add_argument("--quick", action="store_true", help="two workloads on single devices")
    parser.add_argument("--targets", help=f"comma-separated; default {','.join(DEFAULT_TARGETS)}")
    parser.add_argument("--workloads", help=f"comma-separated, of {', '.join(known)}")
    parser.add_argument(
        "--output",
        type=pathlib.Path,
        help="default benchmarks/results, or output/targets of a part",
    )
    parser.add_argument("--part", nargs=3, help=argparse.SUPPRESS)
    args = parser.parse_args(arguments)
    is_all = not (args.quick or args.targets or args.workloads)
    args.output = args.output or HERE / ("results" if is_all else "output/targets")
    names = args.workloads.split(",") if args.workloads else QUICK if args.quick else known
    unknown = sorted(set(names) - set(known))
    if unknown:
        parser.error(f"expected names out of {', '.join(known)}; got {', '.join(unknown)}")
    args.workloads = names
    args.targets = args.targets.split(",") if args.targets else DEFAULT_TARGETS
    return args


def planned(targets: list[str], names: list[str]) -> Iterator[tuple[str, str, str]]:
    """Yields (part, workload, target); large transformers are for targets of several devices."""
    for target in targets:
        if target.count(":") == 1:
            yield from (("step", name, target) for name in names if name in TRAINED)
            yield from (("population", name, target) for name in names if name in POPULATIONS)
        else:
            models = SLICES.get(target, large_transformers.SIZES)
            large = [name for name in names if name in models]
            yield from (
                ("memory", f"{name}, {way}", target)
                for name in large
                for way in large_transformers.WAYS
            )


def in_child(part: str, name: str, target: str) -> Iterator[Row]:
    """Runs a part in a new process, and yields its rows as they come, or its error."""
    command = [sys.executable, "-m", "benchmarks.targets", "--part", part, name, target]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=HERE.parent) as child:
        assert child.stdout is not None
        yield from map(json.loads, child.stdout)
    if child.returncode:
        # The child's messages are above, on the standard error that it shares.
        error = f"exit status {child.returncode}"
        yield {"part": part, "target": target, "name": name, "error": error}


def versions() -> dict[str, str]:
    """Returns the versions of the compilers, and of the libraries that make the programs."""
    found = {}
    for package in ("jax", "jaxlib", "libtpu", "jax-cuda12-pjrt", "keras"):
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            found[package] = "missing"
    return found


# The functions below run in the child processes.


def step_rows(name: str, target: ft.Target) -> Iterator[Row]:
    """Yields what a step costs: alone, fused, in a scan, and with the step of Keras."""
    workload = WORKLOADS[name]
    state, step = functrain_parts(workload)
    batch = workload.make_data(workload.batch)
    chunk = jax.tree.map(lambda x: jax.ShapeDtypeStruct((K, *x.shape), x.dtype), batch)
    carry = step.start(state) if isinstance(step, ft.MeteredStep) else state
    yield {
        "name": name,
        "way": "one step",
        **compiled_cost(jax.jit(step, donate_argnums=0), 1, target, carry, batch),
    }
    yield {"name": name, "way": f"fused {K}", **functrain_cost(state, step, batch, target)}
    scan = jax.jit(lambda carry, chunk: jax.lax.scan(step, carry, chunk), donate_argnums=0)
    yield {"name": name, "way": "scan by hand", **compiled_cost(scan, K, target, carry, chunk)}
    if not workload.own_step:
        keras_state, scan = keras_scan(compiled(workload), batch)
        cost = compiled_cost(scan, K, target, keras_state, chunk)
        yield {"name": name, "way": "Keras's train_step", **cost}


def population_rows(name: str, target: ft.Target) -> Iterator[Row]:
    """Yields what a step of a whole population costs, for several sizes."""
    workload = WORKLOADS[name]
    state, step = functrain_parts(workload)
    batch = workload.make_data(workload.batch)
    over_members = ft.population.step(step)
    for members in MEMBERS:
        stacked = ft.population.stack([state] * members)
        cost = functrain_cost(stacked, over_members, batch, target)
        yield {"name": name, "members": members, **cost}


def functrain_cost(state: Any, step: Any, batch: Any, target: ft.Target) -> Row:
    """Returns what functrain reports about K fused steps, per step."""
    cost = ft.inspect.cost(state, step, batch, fuse=K, target=target)
    needed = ft.inspect.memory(state, step, batch, fuse=K, target=target)
    cycles = cost.seconds * cost.chip.clock_hz if target.platform == "tpu" else 0
    return {"cycles": round(cycles), "kernels": cost.kernels, "temporaries": needed.temporaries}


def compiled_cost(run: Any, k: int, target: ft.Target, *args: Any) -> Row:
    """Returns what the compiler estimates for a jitted function of K steps, per step."""
    with compiling_for(target.platform):
        program = run.lower(*map(target.shapes, args)).compile()
    cycles, kernels = 0, 0
    for instruction, calls in _hlo.instructions(program.as_text()):
        cycles += calls * instruction.cycles
        kernels += calls * (instruction.opcode in _hlo.KERNELS)
    temporaries = program.memory_analysis().temp_size_in_bytes
    return {"cycles": round(cycles / k), "kernels": kernels / k, "temporaries": temporaries}


def memory_rows(name: str, target: ft.Target) -> Iterator[Row]:
    """Yields the memory of a large transformer, "model, sharding", on each chip of a slice."""
    model, way = name.split(", ")
    start = time.perf_counter()
    size = large_transformers.SIZES[model]
    state, step, batch, sharding = large_transformers.on_target(size, target, way)
    options: dict[str, Any] = {"fuse": 1, "target": target, "sharding": sharding}
    # donate=True: no run of such a model keeps a second copy of its first state.
    needed = ft.inspect.memory(state, step, batch, donate=True, **options)
    row = {
        "name": model,
        "way": way,
        "seconds": time.perf_counter() - start,
        "state": needed.state,
        "temporaries": needed.temporaries,
        "total": needed.total,
        "memory": target.chip.memory_bytes,
        "fits": needed.fits,
    }
    if needed.fits:
        traffic = ft.inspect.cost(state, step, batch, **options).traffic
        row["collectives"] = {kind: [x.calls, x.bytes] for kind, x in traffic.items()}
    yield row


PARTS: dict[str, Callable[[str, ft.Target], Iterator[Row]]] = {
    "step": step_rows,
    "population": population_rows,
    "memory": memory_rows,
}


if __name__ == "__main__":
    sys.exit(main())
