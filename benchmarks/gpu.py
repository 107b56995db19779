"""Measures functrain and its alternatives on a GPU, in two runs of at most 11 and 20 minutes.

python -m benchmarks.gpu --part first       # the first half of the parts; then --part second
python -m benchmarks.gpu --part dispatch,fit
python -m benchmarks.gpu --list
python -m benchmarks.gpu --quick            # small sizes; runs to its end on a CPU, too

The most important parts come first. Each has a process of its own, because XLA reads its
flags only once, and because a process of JAX takes most of the device's memory. A part has a limit
in seconds: what it has measured until then is kept, and results.json is written after each part.
Within a part the ways take turns, so that a slow moment of the machine affects all of them. A way
of a large model is a part, whose memory and first epoch are measured, too. Ways run two or three
times before they are timed, because the first calls of a CUDA graph are slower.

The part "device" prints the target configuration of the GPU. With its text, estimates for this GPU
are made on machines that have only its compiler: `functrain.inspect.cost(state, step, batch,
target=functrain.target(text))`, and `memory`. A compiler that is older than the text refuses it:
remove the lines that are new. Keras chooses cuDNN's attention only where it finds a GPU, so that
estimates without one are those of XLA's attention.
"""

import argparse
import contextlib
import json
import os
import pathlib
import subprocess
import sys
import tempfile
import time
from typing import Any, NamedTuple

from benchmarks import report

OUTPUT = pathlib.Path(__file__).parent / "output" / "gpu"
LARGE = ["gpt2", "resnet50-224"]
LARGE_WAYS = ["fused", "jit-loop", "scan", "bridge-fit", "keras-fit", "functrain-fit"]
LARGE_WAYS += ["torch-compile", "torch-graph"]
# XLA's flags by the name of the setting. XLA calls CUDA graphs "command buffers". By default they
# contain no loops.
FLAGS = {
    "no CUDA graphs": "--xla_gpu_enable_command_buffer=",
    "loops in CUDA graphs": "--xla_gpu_enable_command_buffer=+WHILE",
    "unrolled loops in CUDA graphs": (
        "--xla_gpu_enable_command_buffer=+WHILE --xla_gpu_command_buffer_unroll_loops=true"
    ),
    "CUDA graphs of any size": "--xla_gpu_graph_min_graph_size=1",
    # A loop that copies its batch out of the chunk is not put into a graph by +WHILE alone.
    "loops and their copies in CUDA graphs": (
        "--xla_gpu_enable_command_buffer=+WHILE,+DYNAMIC_SLICE_COPY_FUSION "
        "--xla_gpu_graph_min_graph_size=1"
    ),
}
DETERMINISTIC = "--xla_gpu_deterministic_ops=true --xla_gpu_autotune_level=0"


class Part(NamedTuple):
    """A part of the measurement.

    Attributes:
      run: "first" or "second".
      seconds: The limit of its time.
      function: The name of its function in `benchmarks.gpu_parts`.
      arguments: Arguments of the function before `quick` and `rounds`.
      flags: Flags of XLA for the process.
    """

    run: str
    seconds: int
    function: str
    arguments: tuple[str, ...] = ()
    flags: str = ""


def main() -> int:
    """Runs the parts, each in its own process; returns 1 if one of them failed."""
    args = parse()
    if args.child:
        measure(parts()[args.child], args.quick, args.rounds)
        return 0
    if args.list:
        print("\n".join(f"{p.run:6} {p.seconds:4} s  {name}" for name, p in parts().items()))
        return 0
    args.output.mkdir(parents=True, exist_ok=True)
    results: dict[str, Any] = {"rounds": args.rounds, "quick": args.quick}
    begun = time.perf_counter()
    for name, part in parts().items():
        left = args.seconds - (time.perf_counter() - begun)
        if args.parts and not {name, part.run} & args.parts:
            continue
        start = time.perf_counter()
        results[name] = in_child(name, part, args, left) if left > 10 else {"error": "no time left"}
        (args.output / "results.json").write_text(json.dumps(results, indent=1) + "\n")
        print(f"{name}: {time.perf_counter() - start:.0f} s\n{table(results[name])}", flush=True)
    return int(any("error" in result for result in results.values() if isinstance(result, dict)))


def parse() -> argparse.Namespace:
    """Parses the command line."""
    parser = report.parser("benchmarks.gpu", __doc__)
    parser.add_argument("--part", default="", help='"first", "second", or names, with commas')
    parser.add_argument("--list", action="store_true", help="list the parts and their limits")
    parser.add_argument("--quick", action="store_true", help="small sizes and few rounds")
    parser.add_argument("--rounds", type=int, help="default 5; 2 with --quick")
    parser.add_argument("--seconds", type=float, default=1e9, help="the limit of all parts")
    parser.add_argument("--output", type=pathlib.Path, default=OUTPUT)
    parser.add_argument("--child", help=argparse.SUPPRESS)
    args = parser.parse_args()
    args.rounds = args.rounds or (2 if args.quick else 5)
    args.parts = set(filter(None, args.part.split(",")))
    if unknown := args.parts - {"first", "second"} - set(parts()):
        parser.error(f"--part: unknown {', '.join(sorted(unknown))}; --list shows the names")
    return args


def parts() -> dict[str, Part]:
    """Returns the parts by name, the most important first."""
    of_large = {
        f"{name} {way}": Part("second", 60, "large", (name, way))
        for name in LARGE
        for way in LARGE_WAYS
    }
    of_flags = {
        f"flags: {name}": Part("first", 45, "flagged", flags=flags) for name, flags in FLAGS.items()
    }
    deterministic = Part("second", 60, "independence", flags=DETERMINISTIC)
    return {
        "device": Part("first", 40, "device"),
        "dispatch": Part("first", 60, "dispatch"),
        "steps": Part("first", 120, "steps"),
        "fit": Part("first", 100, "fit"),
        **of_flags,
        "torch": Part("first", 90, "torch"),
        **of_large,
        "gpt2 fused without cuDNN": Part("second", 60, "without_cudnn", ("gpt2", "fused")),
        "K-independence": Part("second", 60, "independence"),
        "deterministic K-independence": deterministic,
        "populations": Part("second", 50, "populations"),
    }


def measure(part: Part, quick: bool, rounds: int) -> None:
    """Prints each result of a part as a line of JSON."""
    # If the process of all parts imported it, it would reserve the device's memory.
    from benchmarks import gpu_parts

    function = getattr(gpu_parts, part.function)
    for name, result in function(*part.arguments, quick, rounds):
        print(json.dumps({name: result}), flush=True)


def in_child(name: str, part: Part, args: argparse.Namespace, left: float) -> dict[str, Any]:
    """Runs one part in a new process; returns its results until its end or its limit."""
    flags = f"{os.environ.get('XLA_FLAGS', '')} {part.flags}".strip()
    environment = {**os.environ, "KERAS_BACKEND": "jax", "XLA_FLAGS": flags}
    command = [sys.executable, "-m", "benchmarks.gpu", "--child", name]
    command += ["--rounds", str(args.rounds)]
    if args.quick:
        command.append("--quick")
    limit = min(part.seconds * (10 if args.quick else 1), left)
    results: dict[str, Any] = {}
    with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as err:
        process = subprocess.Popen(command, env=environment, stdout=out, stderr=err)
        try:
            if process.wait(timeout=limit):
                err.seek(0)
                results["error"] = err.read()[-4000:]
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
            results["error"] = f"stopped after {limit:.0f} s"
        out.seek(0)
        for line in out:
            # Libraries print, too, and the last line of a process that was stopped may be cut.
            with contextlib.suppress(json.JSONDecodeError, TypeError):
                results |= json.loads(line)
    return results


def table(result: dict[str, Any]) -> str:
    """Returns one line for each entry of a part's result."""
    return "\n".join(f"  {name}: {_text(value)}" for name, value in result.items())


def _text(value: Any) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{name} {_text(x)}" for name, x in value.items() if name != "rounds")
    return f"{value:.4g}" if isinstance(value, float) else str(value)[-300:]


if __name__ == "__main__":
    sys.exit(main())
