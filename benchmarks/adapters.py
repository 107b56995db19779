"""Compares eight adapters over one frozen base, in one program, with other ways to train them.

The models are the classifier of examples/lora.py, and the transformer of docs/training.md#lora. The
first table has the memory that a fit needs, the second one the time of a step of all eight.

python -m benchmarks.adapters
python -m benchmarks.adapters --quick
"""

import statistics
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
from rich.console import Console
from rich.table import Table

import functrain as ft
from benchmarks import report

MEMBERS, RANK = 8, 8
SHARED = "model_state/frozen/**"
TX = optax.adam(1e-3)


class Classifier(nn.Module):
    """Classifies flat MNIST digits."""

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        """Returns logits, `f32[B, 10]`."""
        for _ in range(2):
            x = nn.relu(nn.Dense(256)(x))
        return nn.Dense(10)(x)


class Transformer(nn.Module):
    """Predicts tokens: four blocks of 256 features."""

    @nn.compact
    def __call__(self, tokens: jax.Array) -> jax.Array:
        """Returns logits, `f32[B, L, 1000]`."""
        x = nn.Embed(1000, 256)(tokens)
        for _ in range(4):
            x += nn.MultiHeadDotProductAttention(4)(nn.LayerNorm()(x))
            x += nn.Dense(256)(nn.gelu(nn.Dense(1024)(nn.LayerNorm()(x))))
        return nn.Dense(1000)(x)


class Case(NamedTuple):
    """A model, a batch of one member, and the steps of a round."""

    module: nn.Module
    batch: tuple[np.ndarray, np.ndarray]
    steps: int


def cases() -> dict[str, Case]:
    """Returns the models by name."""
    rng = np.random.default_rng(0)
    images, labels = rng.random((64, 784), np.float32), rng.integers(0, 10, 64)
    tokens = rng.integers(0, 1000, (4, 64))
    return {
        "classifier": Case(Classifier(), (images, labels), 64),
        "transformer": Case(Transformer(), (tokens, tokens), 2),
    }


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command line; returns the exit status."""
    parser = report.parser("benchmarks.adapters", __doc__)
    parser.add_argument("--model", choices=tuple(cases()), help="one of them instead of both")
    parser.add_argument("--rounds", type=int, default=5, help="default 5; 2 with --quick")
    parser.add_argument("--quick", action="store_true", help="few rounds and steps")
    args = parser.parse_args(arguments)
    console = Console()
    for name, case in cases().items():
        if args.model not in (None, name):
            continue
        if args.quick:
            case = case._replace(steps=2)
        trainings = make_trainings(case)
        console.print(memory_table(name, trainings))
        console.print(time_table(name, trainings, case.steps, 2 if args.quick else args.rounds))
    return 0


class Training(NamedTuple):
    """A state, its step and a batch, and how many such trainings eight members need."""

    state: Any
    step: Any
    batch: Any
    repeats: int = 1


def make_trainings(case: Case) -> dict[str, Training]:
    """Returns the ways to train eight members, and one member with all params, by name."""
    model = ft.from_linen(case.module)
    base = model.init(jax.random.key(0), case.batch[0])
    pretrained = ft.Model(lambda key, x: base, model.apply)
    of_eight = jax.tree.map(lambda x: np.stack([x] * MEMBERS), case.batch)

    def parts(model: ft.Model) -> tuple[Callable[[jax.Array], Any], Any]:
        def make_state(key: jax.Array) -> ft.TrainState:
            params, model_state = model.init(key, case.batch[0])
            return ft.TrainState.create(params=params, model_state=model_state, tx=TX, rng=key)

        loss_fn = ft.supervised(model, optax.softmax_cross_entropy_with_integer_labels)
        return make_state, ft.train_step(loss_fn, TX)

    def alone(model: ft.Model) -> Training:
        make_state, step = parts(model)
        return Training(make_state(jax.random.key(1)), step, case.batch, MEMBERS)

    def together(model: ft.Model, **options: Any) -> Training:
        make_state, step = parts(model)
        population = ft.population.create(make_state, jax.random.key(1), members=MEMBERS, **options)
        return Training(population, ft.population.step(step, data="per_member"), of_eight)

    adapted = ft.lora(pretrained, "**/kernel", rank=RANK)
    factored = ft.lora(pretrained, "**/kernel", rank=RANK, factored=True)
    return {
        "one after another, factored": alone(factored),
        "one after another": alone(adapted),
        "one after another, all params": alone(pretrained),
        "together, one base, factored": together(factored, shared=SHARED),
        "together, one base": together(adapted, shared=SHARED),
        "together, eight bases, factored": together(factored),
        "together, all params": together(pretrained),
    }


def memory_table(name: str, trainings: dict[str, Training]) -> Table:
    """Returns the memory and the FLOPs of each training: of one member, if they take turns."""
    title = f"{name}: memory, MiB"
    table = Table("training", "state", "trained params", "whole fit", "GFLOP / step", title=title)
    for way, (state, step, batch, repeats) in trainings.items():
        need = ft.inspect.memory(state, step, batch)
        params = (state if repeats > 1 else state.states).params
        sizes = need.state, sum(x.nbytes for x in jax.tree.leaves(params)), need.total
        gflops = ft.inspect.cost(state, step, batch).flops / 1e9
        table.add_row(way, *(f"{size / 2**20:.2f}" for size in sizes), f"{gflops:.2f}")
    return table


def time_table(name: str, trainings: dict[str, Training], steps: int, rounds: int) -> Table:
    """Returns the medians of the times that one step of all eight members takes.

    The ways take turns in each round, so that a slow moment of the machine affects all of them. The
    ratios are those to the first way.
    """
    programs = {way: make_program(training, steps) for way, training in trainings.items()}
    seconds: dict[str, list[tuple[float, float]]] = {way: [] for way in programs}
    # The first round compiles and is not counted.
    for i in range(rounds + 1):
        for way, run in programs.items():
            start = time.perf_counter(), time.process_time()
            run()
            if i:
                spent = time.perf_counter() - start[0], time.process_time() - start[1]
                seconds[way].append(spent)
    title = f"{name}: time of a step of eight members"
    table = Table("training", "ms", "relative", "processor ms", "relative", title=title)
    first = next(iter(seconds.values()))
    for way, durations in seconds.items():
        row = []
        for clock in (0, 1):
            median = statistics.median(x[clock] for x in durations)
            ratios = [x[clock] / y[clock] for x, y in zip(durations, first, strict=True)]
            row += [f"{1e3 * median / steps:.2f}", f"{statistics.median(ratios):.2f}"]
        table.add_row(way, *row)
    return table


def make_program(training: Training, steps: int) -> Callable[[], None]:
    """Returns a function that trains all eight members for `steps` steps."""
    program = ft.fuse(training.step, steps)
    batches = jax.tree.map(lambda x: jnp.stack([jnp.asarray(x)] * steps), training.batch)

    def run() -> None:
        for _ in range(training.repeats):
            # The program takes over its state.
            jax.block_until_ready(program(jax.tree.map(jnp.copy, training.state), batches))

    return run


if __name__ == "__main__":
    sys.exit(main())
