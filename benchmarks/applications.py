"""Times a step of every architecture in keras.applications with and without rewrites.

python -m benchmarks.applications --output benchmarks/results/applications.md
python -m benchmarks.applications --names MobileNetV2,ResNet50
python -m benchmarks.applications --set layers --fused
.venv-hub/bin/python -m benchmarks.applications --set hub --fused

The step computes the loss, the gradients and the new statistics, and it is jitted. Each
architecture has its own process, in which the plain and the rewritten program take turns. With
`--fused` the same is measured for fused loops of the step with plain gradient descent.
"""

import argparse
import dataclasses
import importlib.metadata
import itertools
import json
import os
import pathlib
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

os.environ.setdefault("KERAS_BACKEND", "jax")

import jax
import jax.numpy as jnp
import keras
import numpy as np
import optax

import functrain as ft
from benchmarks import report
from benchmarks.architectures import APPLICATIONS, LAYERS, Architecture
from benchmarks.workloads import draw_kernels

ROUNDS = 10
NUDGES = 8
# Steps in a fused program.
STEPS = 8
RATE = 1e-4


def architectures(which: str) -> dict[str, Architecture]:
    """Returns a set of architectures by name; "hub" needs keras-hub (see the Makefile)."""
    if which == "hub":
        from benchmarks.hub import HUB

        return HUB
    return {"applications": APPLICATIONS, "layers": LAYERS}[which]


class Pair(NamedTuple):
    """The measurements of a program without and with rewrites.

    Attributes:
      plain: Seconds a step without rewrites.
      rewritten: Seconds a step with rewrites.
      speed: The speedup by rewriting: the median of the rounds' ratios of wall-clock time.
      processor: The same ratio in processor time, which other programs disturb less.
      compile_plain: Seconds to lower and compile the program without rewrites.
      compile_rewritten: Seconds to lower and compile the program with rewrites.
    """

    plain: float
    rewritten: float
    speed: float
    processor: float
    compile_plain: float
    compile_rewritten: float

    def cells(self) -> list[str]:
        """Returns the cells of the table."""
        ms = [report.milliseconds(x) for x in self[:2]]
        ratios = [f"{x:.2f}×" for x in self[2:4]]
        compiling = [f"{x:.1f}" for x in self[4:]]
        return [*ms, *ratios, *compiling]


@dataclasses.dataclass(frozen=True)
class Compared:
    """The results of one architecture.

    Attributes:
      name: The name of the architecture in its set.
      jitted: The times of the step under `jit`.
      fused: The times of the step in a fused loop, or None without `--fused`.
      difference: The norm of the difference between the rewritten and the plain gradients,
        divided by the norm of the plain gradients.
      rounding: The largest such difference between plain gradients if about half of the weights
        change by one unit in the last place. No float32 program can be expected to be closer. It
        is far larger where such a change makes an activation positive.
    """

    name: str
    jitted: Pair
    fused: Pair | None
    difference: float
    rounding: float

    def row(self) -> str:
        """Returns the row of the table."""
        errors = [f"{x:.1e}" for x in (self.difference, self.rounding)]
        fused = self.fused.cells() if self.fused else []
        return f"| {' | '.join([self.name, *self.jitted.cells(), *errors, *fused])} |"


def head(fused: bool) -> str:
    """Returns the two header lines of the table."""
    columns = "plain, ms | rewritten, ms | speed | processor | compile s | rewritten"
    named = f"{columns} | difference | rounding"
    if fused:
        named += f" | fused: {columns}"
    return f"| architecture | {named} |\n|---|{'---:|' * len(named.split('|'))}"


def step_of(architecture: Architecture) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """Returns ``step(params, rest, x, y) -> (loss, grads, rest)`` and example arguments."""
    keras.utils.set_random_seed(0)
    model = architecture.build()
    draw_kernels(model)

    def loss_fn(params: Any, rest: Any, x: Any, y: jax.Array) -> Any:
        logits, rest = model.stateless_call(params, rest, x, training=True)
        loss = optax.softmax_cross_entropy_with_integer_labels(logits, y).mean()
        return loss, rest

    def step(params: Any, rest: Any, x: Any, y: jax.Array) -> Any:
        (loss, rest), grads = jax.value_and_grad(loss_fn, has_aux=True)(params, rest, x, y)
        return loss, grads, rest

    rng = np.random.default_rng(0)
    x = jax.tree.map(jnp.asarray, architecture.example(rng))
    params, rest = ([v.value for v in vs] for vs in _variables(model))
    *places, classes = jax.eval_shape(model.stateless_call, params, rest, x)[0].shape
    return step, (params, rest, x, jnp.asarray(rng.integers(classes, size=places)))


def _variables(model: keras.Model) -> tuple[list[Any], list[Any]]:
    return model.trainable_variables, model.non_trainable_variables


def compare(
    name: str, architecture: Architecture, rounds: int = ROUNDS, fused: bool = False
) -> Compared:
    """Compiles the plain and the rewritten program, and measures them in turns."""
    step, args = step_of(architecture)
    programs, compiling = _compiled(jax.jit(step), jax.jit(ft.rewrites.optimize(step)), args)
    plain, rewritten = programs
    want = plain(*args)[1]
    # One at a time: the gradients of the largest model take 1.4 GB.
    difference = distance(rewritten(*args)[1], want)
    roundings = [distance(plain(*_nudged(args, seed))[1], want) for seed in range(NUDGES)]
    return Compared(
        name,
        Pair(*_in_turn(programs, args, rounds), *compiling),
        _fused(step, args, rounds) if fused else None,
        difference=difference,
        rounding=max(roundings),
    )


def _fused(step: Callable[..., Any], args: tuple[Any, ...], rounds: int) -> Pair:
    """Measures both programs in a fused loop of `STEPS` steps on one batch."""
    params, rest, *batch = args

    def descent(state: Any, batch: Any) -> Any:
        params, rest = state
        loss, grads, rest = step(params, rest, *batch)
        return (jax.tree.map(lambda w, g: w - RATE * g, params, grads), rest), {"loss": loss}

    chunk = jax.tree.map(lambda x: jnp.stack([x] * STEPS), batch)
    args = (params, rest), chunk, np.int32(STEPS)
    plain, rewritten = (
        ft.fuse(descent, STEPS, donate=False, rewrites=mode) for mode in ("off", "auto")
    )
    programs, compiling = _compiled(plain, rewritten, args)
    plain, rewritten, *ratios = _in_turn(programs, args, rounds)
    return Pair(plain / STEPS, rewritten / STEPS, *ratios, *compiling)


def _compiled(plain: Any, rewritten: Any, args: Any) -> tuple[list[Any], list[float]]:
    """Returns both compiled programs, and the seconds that compiling each took."""
    programs, compile_seconds = [], []
    for jitted in (plain, rewritten):
        start = time.perf_counter()
        programs.append(jitted.lower(*args).compile())
        compile_seconds.append(time.perf_counter() - start)
    return programs, compile_seconds


def _in_turn(programs: Sequence[Any], args: Any, rounds: int) -> list[float]:
    """Returns the median seconds of both, and median ratios of wall-clock and processor time."""
    durations = np.full((rounds or 1, len(programs), 2), np.nan)
    for times, program in itertools.product(durations[:rounds], range(len(programs))):
        start = time.perf_counter(), time.process_time()
        jax.block_until_ready(programs[program](*args))
        end = time.perf_counter(), time.process_time()
        times[program] = np.subtract(end, start)
    ratios = durations[:, 0] / durations[:, 1]
    return [*np.median(durations[..., 0], axis=0).tolist(), *np.median(ratios, axis=0).tolist()]


def _nudged(args: tuple[Any, ...], seed: int) -> tuple[Any, ...]:
    """Changes about half of the weights, drawn at random, by one unit in the last place."""
    rng = np.random.default_rng(seed)

    def nudge(x: jax.Array) -> jax.Array:
        w = np.asarray(x)
        towards = np.float32(np.inf) * rng.choice(np.float32([-1, 1]), w.shape)
        return jnp.asarray(np.where(rng.random(w.shape) < 0.5, np.nextafter(w, towards), w))

    params, *others = args
    return [nudge(w) for w in params], *others


def distance(a: Any, b: Any) -> float:
    """Returns ``|a - b| / |b|``, over all leaves, in float64."""
    squares = np.zeros(2)
    for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        x, y = (np.asarray(v, np.float64) for v in (x, y))
        squares += np.sum((x - y) ** 2), np.sum(y**2)
    return float(np.sqrt(squares[0] / squares[1]))


def main(arguments: Sequence[str] | None = None) -> None:
    """Runs the command line."""
    parser = report.parser("benchmarks.applications", __doc__)
    parser.add_argument("--set", choices=("applications", "layers", "hub"), default="applications")
    parser.add_argument("--names", help="comma-separated; default: the whole set")
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--fused", action="store_true", help="in a fused loop as well")
    parser.add_argument("--output", type=pathlib.Path, help="a file for the table")
    parser.add_argument("--one", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args(arguments)
    available = architectures(args.set)
    names = args.names.split(",") if args.names else list(available)
    if unknown := set(names).difference(available):
        parser.error(f"--names: expected some of {', '.join(available)}, got {sorted(unknown)}")
    if args.one:
        (name,) = names
        compared = compare(name, available[name], args.rounds, args.fused)
        print(json.dumps(dataclasses.asdict(compared)))
        return
    lines = [_sentence(args.rounds, args.set), "", head(args.fused)]
    print("\n".join(lines))
    for line in _rows(names, args):
        print(line, flush=True)
        lines.append(line)
        # The file is written after each architecture, so an interrupt loses only one of them.
        if args.output:
            args.output.write_text("\n".join(lines) + "\n")


def _rows(names: Sequence[str], args: argparse.Namespace) -> Iterator[str]:
    for name in names:
        command = [sys.executable, "-m", "benchmarks.applications", "--one", "--names", name]
        command += [
            "--set",
            args.set,
            "--rounds",
            str(args.rounds),
            *(["--fused"] if args.fused else []),
        ]
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True)
        if done.returncode:
            yield f"| {name} | failed |"
        else:
            yield _read(json.loads(done.stdout.splitlines()[-1])).row()


def _read(fields: dict[str, Any]) -> Compared:
    pairs = {key: fields[key] and Pair(*fields[key]) for key in ("jitted", "fused")}
    return Compared(**fields | pairs)


def _sentence(rounds: int, which: str) -> str:
    m = report.machine()
    hub = f", keras-hub {importlib.metadata.version('keras-hub')}" if which == "hub" else ""
    return (
        f"A jitted step (loss, gradients, statistics): medians of {rounds} interleaved rounds. "
        "The speeds are medians of the rounds' ratios, in wall-clock and in processor time. "
        f"{m['cpu']}, {m['cores']} cores, {m['system']}, Python {m['python']}, jax "
        f"{jax.__version__}, keras {keras.__version__}{hub}. Difference: the norm "
        "of the difference between the gradients, divided by the norm of the plain ones. Rounding: "
        "the same for plain gradients after half of the weights change by one unit in the last "
        f"place, the largest of {NUDGES} trials."
    )


if __name__ == "__main__":
    main()
