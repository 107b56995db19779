"""Measures fused steps on a GPU: by K, by population size, and with or without CUDA graphs.

python -m benchmarks.gpu                    # on a machine with a GPU: under ten minutes
python -m benchmarks.gpu --quick            # small sizes; also runs on a CPU

Every setting of XLA's flags has its own process, because XLA reads the flags only once. Within a
process the ways take turns, so that a slow moment of the machine affects all of them. Each way runs
three times before it is timed, because the first calls of a CUDA graph are slower.
"""

import argparse
import json
import os
import pathlib
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from typing import Any

OUTPUT = pathlib.Path(__file__).parent / "output" / "gpu"
WORKLOADS = ["digits-mlp", "mnist-mlp", "mnist-convnet", "transformer"]
KS = [1, 8, 32, 128]
MEMBERS = [1, 32, 256]
WARM_UPS = 3
# XLA's flags by the name of the setting. XLA calls CUDA graphs "command buffers". By default they
# contain no loops.
FLAGS = {
    "default": "",
    "no CUDA graphs": "--xla_gpu_enable_command_buffer=",
    "loops in CUDA graphs": "--xla_gpu_enable_command_buffer=+WHILE",
    "loops in CUDA graphs, unrolled": (
        "--xla_gpu_enable_command_buffer=+WHILE --xla_gpu_command_buffer_unroll_loops=true"
    ),
    "CUDA graphs of any size": "--xla_gpu_graph_min_graph_size=1",
}
DETERMINISTIC = "--xla_gpu_deterministic_ops=true --xla_gpu_autotune_level=0"


def main() -> int:
    """Runs every part in its own process, and writes results.json after each part."""
    parser = argparse.ArgumentParser(prog="benchmarks.gpu", description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="small sizes and few rounds")
    parser.add_argument("--rounds", type=int, help="default 7; 2 with --quick")
    parser.add_argument("--output", type=pathlib.Path, default=OUTPUT)
    parser.add_argument("--only", default="", help="comma-separated beginnings of results' names")
    parser.add_argument("--part", help=argparse.SUPPRESS)
    args = parser.parse_args()
    args.rounds = args.rounds or (2 if args.quick else 7)
    if args.part:
        print(json.dumps(PARTS[args.part](args.quick, args.rounds)))
        return 0
    args.output.mkdir(parents=True, exist_ok=True)
    results: dict[str, Any] = {"rounds": args.rounds, "quick": args.quick}
    failed = False
    only = tuple(args.only.split(","))
    for name, part, flags in _planned():
        if not name.startswith(only):
            continue
        start = time.perf_counter()
        results[name] = _in_child(part, flags, args)
        failed |= "error" in results[name]
        (args.output / "results.json").write_text(json.dumps(results, indent=1) + "\n")
        print(f"{name}: {time.perf_counter() - start:.0f} s")
        print(_table(results[name]), flush=True)
    return int(failed)


def _planned() -> list[tuple[str, str, str]]:
    """Returns (result name, part name, XLA flags) for each part, the most important first."""
    flags = [(f"flags: {name}", "flags", value) for name, value in FLAGS.items()]
    independence = [
        ("K-independence", "independence", ""),
        ("K-independence, deterministic operations", "independence", DETERMINISTIC),
    ]
    return [
        ("device", "device", ""),
        ("steps", "steps", ""),
        ("populations", "populations", ""),
        *independence,
        *flags,
        ("fit", "fit", ""),
    ]


def _in_child(part: str, flags: str, args: argparse.Namespace) -> dict[str, Any]:
    """Runs one part in a new process and returns what it printed, or its error."""
    environment = {
        **os.environ,
        "KERAS_BACKEND": "jax",
        "XLA_FLAGS": f"{os.environ.get('XLA_FLAGS', '')} {flags}".strip(),
    }
    command = [sys.executable, "-m", "benchmarks.gpu", "--part", part]
    command += ["--rounds", str(args.rounds), *["--quick"] * args.quick]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    if done.returncode:
        return {"error": done.stderr[-4000:]}
    result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return result


def _table(result: dict[str, Any]) -> str:
    """Returns one line for each entry of a part's result."""
    return "\n".join(f"  {name}: {_text(value)}" for name, value in result.items())


def _text(value: Any) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{name} {_text(x)}" for name, x in value.items() if name != "rounds")
    return f"{value:.4g}" if isinstance(value, float) else str(value)[:300]


# The functions below run in the child processes. They import JAX themselves: if the parent process
# imported and used it, it would reserve the device's memory.


def device(quick: bool, rounds: int) -> dict[str, Any]:
    """Returns the device's name, memory and target configuration, and the versions of JAX."""
    with tempfile.TemporaryDirectory() as folder:
        # XLA writes the configuration of a GPU beside every program that it dumps. With its text,
        # `functrain.target` compiles for this GPU on other machines.
        os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} --xla_dump_to={folder}"
        import jax
        import jaxlib

        first = jax.devices()[0]
        jax.jit(lambda x: x + 1)(0.0).block_until_ready()
        configs = sorted(pathlib.Path(folder).glob("*.gpu_target_config.pbtxt"))
        target_config = configs[0].read_text() if configs else ""
    return {
        "kind": first.device_kind,
        "platform": first.platform,
        "jax": jax.__version__,
        "jaxlib": jaxlib.__version__,
        "memory": first.memory_stats() or {},
        "target_config": target_config,
    }


def steps(quick: bool, rounds: int) -> dict[str, Any]:
    """Times a step of each workload for each K, and in loops written by hand."""
    return {name: _steps_of(name, quick, rounds) for name in WORKLOADS}


def _steps_of(name: str, quick: bool, rounds: int) -> dict[str, Any]:
    import jax

    import functrain as ft
    from benchmarks.jax_ways import _by_hand, functrain_parts
    from benchmarks.workloads import WORKLOADS as KNOWN

    workload = KNOWN[name]
    n = 8 if quick else (128 if workload.steps < 512 else 1024)
    epoch = _on_device(workload, n)
    state, step = functrain_parts(workload)
    ways: dict[str, Callable[[], Any]] = {}
    for k in KS:
        if k <= n:
            ways[f"fused {k}"] = _passes(ft.fuse(step, k), step.start(state), _cut(epoch, n, k))
    carry, by_hand = _by_hand(workload)
    batches = [jax.tree.map(lambda x, i=i: x[i], epoch) for i in range(n)]
    jitted = jax.jit(by_hand, donate_argnums=0)
    ways["jit loop"] = _passes(lambda c, batch: (jitted(c, batch), None), carry, batches)
    scan = jax.jit(
        lambda c, chunk: (jax.lax.scan(lambda c, b: (by_hand(c, b), None), c, chunk)[0], None),
        donate_argnums=0,
    )
    ways[f"scan {min(n, 32)} by hand"] = _passes(scan, carry, _cut(epoch, n, min(n, 32)))
    timed = _timed(ways, n, rounds)
    cost = ft.inspect.cost(state, step, batches[0], fuse=min(n, 32))
    return {**timed, "kernels a step": cost.kernels}


def populations(quick: bool, rounds: int) -> dict[str, Any]:
    """Times a step of a whole population, for several sizes."""
    import functrain as ft
    from benchmarks.jax_ways import functrain_parts
    from benchmarks.workloads import WORKLOADS as KNOWN

    results = {}
    k = 8 if quick else 32
    for name in ("digits-mlp", "mnist-mlp"):
        workload = KNOWN[name]
        n = k if quick else 256
        epoch = _on_device(workload, n)
        state, step = functrain_parts(workload)
        over_members = ft.population.step(step)
        ways = {}
        for members in MEMBERS[: 2 if quick else None]:
            stacked = ft.population.stack([state] * members)
            started = over_members.start(stacked)
            fused = ft.fuse(over_members, k)
            ways[f"{members} members"] = _passes(fused, started, _cut(epoch, n, k))
        results[name] = _timed(ways, n, rounds)
    return results


def independence(quick: bool, rounds: int) -> dict[str, Any]:
    """Compares the params after 128 steps, bit for bit, between each K and single steps."""
    import jax
    import numpy as np

    import functrain as ft
    from benchmarks.jax_ways import functrain_parts
    from benchmarks.workloads import WORKLOADS as KNOWN

    results = {}
    for name in WORKLOADS:
        workload = KNOWN[name]
        n = 8 if quick else 128
        epoch = _on_device(workload, n)
        state, step = functrain_parts(workload)

        def trained(k: int, state=state, step=step, epoch=epoch, n=n) -> list[np.ndarray]:
            carry = jax.tree.map(lambda x: x.copy(), step.start(state))
            fused = ft.fuse(step, k)
            # Chunks of the batches in their order, and from the first again, so that all are full.
            # The last one takes as many steps as there are left.
            for start in range(0, n, k):
                rows = np.arange(start, start + k) % n
                chunk = jax.tree.map(lambda x, rows=rows: x[rows], epoch)
                carry, _ = fused(carry, chunk, min(k, n - start))
            return [np.asarray(x) for x in jax.tree.leaves(carry.state.params)]

        ks = [k for k in (1, 7, 8, 32, 128) if k <= n]
        by_k = {k: trained(k) for k in ks}
        again = trained(8)
        results[name] = {"8, repeated": _difference(by_k[8], again)}
        results[name] |= {f"K={k}": _difference(by_k[1], by_k[k]) for k in ks[1:]}
    return results


def _difference(a: list[Any], b: list[Any]) -> str:
    import numpy as np

    if all(x.tobytes() == y.tobytes() for x, y in zip(a, b, strict=True)):
        return "equal bits"
    largest = max(float(np.max(np.abs(x - y))) for x, y in zip(a, b, strict=True))
    return f"differs by up to {largest:.2g}"


def flags(quick: bool, rounds: int) -> dict[str, Any]:
    """Times single steps and 32 fused steps with the XLA flags of this process."""
    names = WORKLOADS[:2] if quick else WORKLOADS
    return {name: _flags_of(name, quick, rounds) for name in names}


def _flags_of(name: str, quick: bool, rounds: int) -> dict[str, Any]:
    import functrain as ft
    from benchmarks.jax_ways import functrain_parts
    from benchmarks.workloads import WORKLOADS as KNOWN

    workload = KNOWN[name]
    n = 8 if quick else 128
    epoch = _on_device(workload, n)
    state, step = functrain_parts(workload)
    return _timed(
        {
            f"fused {k}": _passes(ft.fuse(step, k), step.start(state), _cut(epoch, n, k))
            for k in (1, 8 if quick else 32)
        },
        n,
        rounds,
    )


def fit(quick: bool, rounds: int) -> dict[str, Any]:
    """Times `functrain.fit`, `bridge.fit` and Keras's `fit`, end to end."""
    import dataclasses

    from benchmarks import jax_ways, keras_ways
    from benchmarks.workloads import WORKLOADS as KNOWN

    results = {}
    for name in WORKLOADS[:1] if quick else WORKLOADS:
        workload = KNOWN[name]
        n = 8 if quick else min(1024, 8 * workload.steps)
        workload = dataclasses.replace(workload, steps=n)
        ways = {
            "functrain.fit": jax_ways.functrain_fit(workload),
            "bridge.fit": jax_ways.bridge_fit(workload),
            "Keras fit": keras_ways.keras_fit(workload),
            "Keras fit, steps_per_execution=32": keras_ways.keras_fit_32(workload),
        }
        results[name] = _timed(ways, n, min(rounds, 3))
    return results


PARTS = {
    "device": device,
    "steps": steps,
    "populations": populations,
    "independence": independence,
    "flags": flags,
    "fit": fit,
}


def _on_device(workload: Any, n: int) -> Any:
    """Returns n batches, every leaf `[n, B, ...]`, on the device."""
    import jax

    data = workload.make_data(n * workload.batch)
    return jax.tree.map(lambda x: jax.device_put(x.reshape(n, workload.batch, *x.shape[1:])), data)


def _cut(epoch: Any, n: int, k: int) -> list[Any]:
    """Returns the full chunks of K batches; a smaller last chunk is left out."""
    import jax

    return [jax.tree.map(lambda x, i=i: x[i : i + k], epoch) for i in range(0, n - k + 1, k)]


def _passes(program: Any, carry: Any, chunks: list[Any]) -> Callable[[], None]:
    """Returns a function that runs a program on all chunks and waits for the result."""
    import jax

    carry = jax.tree.map(lambda x: x.copy(), carry)

    def run() -> None:
        nonlocal carry
        for chunk in chunks:
            carry, _ = program(carry, chunk)
        jax.block_until_ready(carry)

    return run


def _timed(ways: dict[str, Callable[[], Any]], n: int, rounds: int) -> dict[str, Any]:
    """Returns the microseconds per step of each way: the median, and those of each round."""
    for run in ways.values():
        for _ in range(WARM_UPS):
            run()
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(rounds):
        for name, run in ways.items():
            start = time.perf_counter()
            run()
            seconds[name].append(time.perf_counter() - start)
    return {
        name: {
            "µs a step": statistics.median(times) / n * 1e6,
            "rounds": [round(t / n * 1e6, 2) for t in times],
        }
        for name, times in seconds.items()
    }


if __name__ == "__main__":
    sys.exit(main())
