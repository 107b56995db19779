"""Every architecture of keras.applications: one step rewritten beside one step as it is.

python -m benchmarks.applications --output benchmarks/results/applications.md
python -m benchmarks.applications --names MobileNetV2,ResNet50

The step is loss, gradients and new statistics, jitted, 8 images of 32×32 (or the least an
architecture takes) in ten classes. Each architecture has a process of its own, where both programs
take turns.
"""

import argparse
import dataclasses
import json
import os
import pathlib
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

os.environ.setdefault("KERAS_BACKEND", "jax")

import jax
import jax.numpy as jnp
import keras
import numpy as np
import optax

import functrain as ft
from benchmarks import report
from benchmarks.workloads import draw_kernels

NAMES = sorted(
    name
    for name, member in vars(keras.applications).items()
    if callable(member) and name[0].isupper()
)
SIZES = {"InceptionResNetV2": 75, "InceptionV3": 75, "Xception": 71}
BATCH = 8
ROUNDS = 10
NUDGES = 8


@dataclasses.dataclass(frozen=True)
class Compared:
    """What came of one architecture.

    Attributes:
      name: As in keras.applications.
      plain: Seconds a step, as it is.
      rewritten: Seconds a step, rewritten.
      compile_plain: Seconds from the function to the program.
      compile_rewritten: The same.
      difference: Of the rewritten gradients from the plain ones: norm over norm.
      rounding: How far the plain ones move at most when weights move by one unit in their last
        place, either way, several times: what no float32 program can be expected to be closer
        than. Where a move makes an activation positive it is larger by far than elsewhere.
    """

    name: str
    plain: float
    rewritten: float
    compile_plain: float
    compile_rewritten: float
    difference: float
    rounding: float

    def row(self) -> str:
        """Returns a line of the table."""
        ms = (report.milliseconds(x) for x in (self.plain, self.rewritten))
        compiling = (f"{x:.1f}" for x in (self.compile_plain, self.compile_rewritten))
        speed = f"{self.plain / self.rewritten:.2f}×"
        errors = (f"{x:.1e}" for x in (self.difference, self.rounding))
        return f"| {' | '.join([self.name, *ms, speed, *compiling, *errors])} |"


HEAD = (
    "| architecture | plain, ms | rewritten, ms | speed | compile s | rewritten | difference "
    "| rounding |\n|---|---:|---:|---:|---:|---:|---:|---:|"
)


def step_of(name: str) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """Returns ``step(params, rest, x, y) -> (loss, grads, rest)`` and its arguments."""
    keras.utils.set_random_seed(0)
    shape = (SIZES.get(name, 32),) * 2 + (3,)
    build = getattr(keras.applications, name)
    model = build(weights=None, classes=10, input_shape=shape, classifier_activation=None)
    draw_kernels(model)

    def loss_fn(params: Any, rest: Any, x: jax.Array, y: jax.Array) -> Any:
        logits, rest = model.stateless_call(params, rest, x, training=True)
        loss = optax.softmax_cross_entropy_with_integer_labels(logits, y).mean()
        return loss, rest

    def step(params: Any, rest: Any, x: jax.Array, y: jax.Array) -> Any:
        (loss, rest), grads = jax.value_and_grad(loss_fn, has_aux=True)(params, rest, x, y)
        return loss, grads, rest

    rng = np.random.default_rng(0)
    x = jnp.asarray(rng.uniform(0, 255, (BATCH, *shape)), jnp.float32)
    params, rest = ([v.value for v in vs] for vs in _variables(model))
    return step, (params, rest, x, jnp.asarray(rng.integers(10, size=BATCH)))


def _variables(model: keras.Model) -> tuple[list[Any], list[Any]]:
    return model.trainable_variables, model.non_trainable_variables


def compare(name: str, rounds: int = ROUNDS) -> Compared:
    """Compiles both programs of an architecture, and measures them in turn."""
    step, args = step_of(name)
    plain, compile_plain = _compiled(step, args)
    rewritten, compile_rewritten = _compiled(ft.rewrites.optimize(step), args)
    want, got = plain(*args), rewritten(*args)
    moved = [plain(*_nudged(args, seed))[1] for seed in range(NUDGES)]
    times: dict[Any, list[float]] = {plain: [], rewritten: []}
    for _ in range(rounds):
        for program, taken in times.items():
            start = time.perf_counter()
            jax.block_until_ready(program(*args))
            taken.append(time.perf_counter() - start)
    medians = [statistics.median(taken or [float("nan")]) for taken in times.values()]
    return Compared(
        name,
        *medians,
        compile_plain,
        compile_rewritten,
        difference=distance(got[1], want[1]),
        rounding=max(distance(grads, want[1]) for grads in moved),
    )


def _compiled(fn: Callable[..., Any], args: Any) -> tuple[Any, float]:
    start = time.perf_counter()
    program = jax.jit(fn).lower(*args).compile()
    return program, time.perf_counter() - start


def _nudged(args: tuple[Any, ...], seed: int) -> tuple[Any, ...]:
    """Moves every weight by half a unit in the last place, on average: one or none of them."""
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
    parser = argparse.ArgumentParser("benchmarks.applications", description=__doc__)
    parser.add_argument("--names", default=",".join(NAMES), help="comma-separated; default all")
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--output", type=pathlib.Path, help="a file for the table")
    parser.add_argument("--one", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args(arguments)
    if args.one:
        print(json.dumps(dataclasses.asdict(compare(args.names, args.rounds))))
        return
    lines = [_sentence(args.rounds), "", HEAD]
    print("\n".join(lines))
    for line in _rows(args.names.split(","), args.rounds):
        print(line, flush=True)
        lines.append(line)
        if args.output:  # each time: an interrupt loses one architecture only
            args.output.write_text("\n".join(lines) + "\n")


def _rows(names: Sequence[str], rounds: int) -> Iterator[str]:
    for name in names:
        command = [sys.executable, "-m", "benchmarks.applications", "--one", "--names", name]
        command += ["--rounds", str(rounds)]
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True)
        if done.returncode:
            yield f"| {name} | failed |"
        else:
            yield Compared(**json.loads(done.stdout.splitlines()[-1])).row()


def _sentence(rounds: int) -> str:
    m = report.machine()
    return (
        f"One step (loss, gradients, statistics), jitted, batch {BATCH}; medians of {rounds} "
        f"interleaved rounds. {m['cpu']}, {m['cores']} cores, {m['system']}, Python "
        f"{m['python']}, jax {jax.__version__}, keras {keras.__version__}. Difference: of the "
        "gradients, norm over norm; rounding: by how much the plain ones move when half the "
        f"weights move by a unit in their last place, the most of {NUDGES}."
    )


if __name__ == "__main__":
    main()
