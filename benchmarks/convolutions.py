"""Measures the methods for convolutions, and fits the cost model that chooses among them.

python -m benchmarks.convolutions measure --layers 150   # some 20 minutes on two idle cores
python -m benchmarks.convolutions fit                    # writes the weights of the cost model
python -m benchmarks.convolutions measure --first 10000 --layers 60 --output FILE
python -m benchmarks.convolutions regret FILE            # of layers that were not fitted

Layers are drawn at random: one to three axes, batches of 1 to 256, groups, strides, dilations,
transposed ones, float32 and bfloat16. Each is measured with both its gradients, in the body of a
loop, as in a fused step. The methods take turns, and the least of five times counts.
"""

import argparse
import concurrent.futures
import collections
import functools
import json
import math
import os
import pathlib
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

os.environ.setdefault("KERAS_BACKEND", "jax")

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from scipy import optimize

from benchmarks import report
from benchmarks.operations import tie
from functrain.rewrites.convolution import _plan
from functrain.rewrites.convolution._description import (
    Convolution,
    bind,
    describe,
    from_canonical,
    to_canonical,
)
from functrain.rewrites.convolution.reductions import trimmed

OUTPUT = pathlib.Path("benchmarks/output/convolutions.jsonl")
WEIGHTS = pathlib.Path(_plan.__file__).with_name("weights.json")
SECONDS = 0.012  # of one measurement
ROUNDS = 5
# After the first round, plans that take longer than this times the fastest are not measured again.
HOPELESS = 6

KINDS = ["plain"] * 5 + ["strided"] * 2 + ["dilated", "transposed", "transposed", "grouped"]
KINDS += ["depthwise"] * 2
BATCHES = [1, 2, 4, 8, 16, 32, 64, 128, 256]
SIZES = [1, 2, 3, 4, 5, 7, 8, 10, 13, 14, 16, 20, 28, 32, 48, 56, 64, 96, 112, 128]
VOLUME_SIZES = [2, 4, 6, 8, 12, 16, 24, 32]
CHANNELS = [1, 2, 3, 4, 8, 16, 24, 32, 48, 64, 96, 128, 160, 192, 256, 384, 512, 768, 1024]
MIN_PRODUCTS, MAX_PRODUCTS, MAX_ELEMENTS = 2**17, 2**29, 2**23


class Layer(NamedTuple):
    """A convolution `[N, *S, C]` x `[*W, I, O]`."""

    kind: str
    image: tuple[int, ...]
    kernel: tuple[int, ...]
    dtype: str
    options: dict[str, Any]

    def __call__(self, x: jax.Array, w: jax.Array) -> jax.Array:
        """Convolves an image with a kernel."""
        return lax.conv_general_dilated(x, w, **self.options)


def draw(seed: int) -> Layer:
    """Returns a layer of a size that takes between some microseconds and some milliseconds."""
    rng = np.random.default_rng(seed)
    while (layer := _draw(rng)) is None:
        pass
    return layer


def _draw(rng: np.random.Generator) -> Layer | None:
    rank = int(rng.choice([1, 2, 2, 2, 2, 3]))
    batch = int(rng.choice(BATCHES))
    size = int(rng.choice(SIZES if rank < 3 else VOLUME_SIZES))
    if rank == 1:
        size *= int(rng.choice([1, 2, 8]))
    inputs, outputs = int(rng.choice(CHANNELS)), int(rng.choice(CHANNELS))
    taps = int(rng.choice([1, 2, 3, 3, 3, 3, 4, 5, 5, 7] if rank < 3 else [1, 2, 3, 3, 3, 5]))
    kind = str(rng.choice(KINDS))
    stride, apart, holes, groups = 1 + (kind == "strided"), 1 + (kind == "dilated"), 1, 1
    if kind == "grouped":
        groups = int(rng.choice([2, 4, 8, 16, 32]))
        inputs, outputs = (max(side // groups, 2) * groups for side in (inputs, outputs))
    if kind == "depthwise":
        groups, outputs = inputs, inputs * int(rng.choice([1, 1, 1, 2]))
        stride = int(rng.choice([1, 1, 2]))
    if kind == "depthwise" and inputs == 1:
        return None
    padding: Any = str(rng.choice(["SAME", "SAME", "VALID"]))
    dtype = str(rng.choice(["float32", "float32", "bfloat16"]))
    if padding == "VALID" and size < (taps - 1) * apart + 1:
        return None
    if kind == "transposed":
        holes = 2
        same = (taps - 1 - (taps - 2) // 2 if taps > 1 else 0, taps // 2)
        padding = [same if padding == "SAME" else (taps - 1, taps - 1)] * rank
    spatial = "DHW"[3 - rank :]
    options = {
        "window_strides": (stride,) * rank,
        "padding": padding,
        "lhs_dilation": (holes,) * rank,
        "rhs_dilation": (apart,) * rank,
        "feature_group_count": groups,
        "dimension_numbers": (f"N{spatial}C", f"{spatial}IO", f"N{spatial}C"),
    }
    image = (batch, *[size] * rank, inputs)
    layer = Layer(kind, image, (*[taps] * rank, inputs // groups, outputs), dtype, options)
    out = jax.eval_shape(layer, *_types(layer))
    products = math.prod(out.shape) * math.prod(layer.kernel[:-1])
    elements = max(out.size, math.prod(layer.image), math.prod(layer.kernel))
    fits = MIN_PRODUCTS <= products <= MAX_PRODUCTS and 0 < elements <= MAX_ELEMENTS
    return layer if fits and out.size else None


def _types(layer: Layer) -> list[jax.ShapeDtypeStruct]:
    return [jax.ShapeDtypeStruct(shape, layer.dtype) for shape in (layer.image, layer.kernel)]


def equations(layer: Layer) -> list[Any]:
    """Returns the equations of a layer and of the gradients of both its operands."""

    def fn(x: jax.Array, w: jax.Array, g: jax.Array) -> tuple[jax.Array, ...]:
        out, pull = jax.vjp(layer, x, w)
        return out, *pull(g)

    x, w = _types(layer)
    jaxpr = jax.make_jaxpr(fn)(x, w, jax.eval_shape(layer, x, w)).jaxpr
    return [eqn for eqn in jaxpr.eqns if eqn.primitive.name == "conv_general_dilated"]


def each_plan(conv: Convolution, depth: int = 1) -> Iterator[_plan.Plan]:
    """Yields all plans for a convolution; of reductions those with one method for all parts."""
    for method in [trimmed] if trimmed.applies(conv) else _plan.METHODS:
        if not method.applies(conv):
            continue
        parts = [part for part, _ in method.parts(conv)]
        if not parts:
            yield _plan.Plan(method, math.nan, {})
        elif depth or method is trimmed:
            inner = depth - (method is not trimmed)
            plans = [{plan.name: plan for plan in each_plan(part, inner)} for part in parts]
            for name in plans[0]:
                if all(name in each for each in plans):
                    by_part = {p: each[name] for p, each in zip(parts, plans, strict=True)}
                    yield _plan.Plan(method, math.nan, by_part)


def plans_of(eqn: Any) -> dict[str, Callable[..., jax.Array]]:
    """Returns the functions that compute a convolution, by the names of their plans.

    "as written" is the convolution as jax writes it, and "canonical" the one that XLA gets from
    `canonical_conv`: the better of the two is XLA's own.
    """
    conv = describe(*(var.aval for var in eqn.invars), eqn.params)
    numbers = eqn.params["dimension_numbers"]

    def canonical(compute: Callable[..., jax.Array]) -> Callable[..., jax.Array]:
        return lambda x, w: from_canonical(compute(*to_canonical(x, w, numbers)), numbers)

    functions = {
        "as written": lambda x, w: eqn.primitive.bind(x, w, **eqn.params),
        "canonical": canonical(functools.partial(bind, conv)),
    }
    for plan in each_plan(conv):
        functions[plan.name] = canonical(functools.partial(plan.lower, conv))
    return functions


def measure(eqn: Any) -> dict[str, float]:
    """Returns the seconds of each plan for a convolution, in the body of a loop."""
    rng = np.random.default_rng(0)
    x, w = (jnp.asarray(rng.standard_normal(v.aval.shape), v.aval.dtype) for v in eqn.invars)
    out = jnp.zeros(eqn.outvars[0].aval.shape, eqn.outvars[0].aval.dtype)
    functions = plans_of(eqn)
    with concurrent.futures.ThreadPoolExecutor() as pool:
        loops = pool.map(lambda fn: _compile_loop(fn, x, w, out), functions.values())
    runs = dict(zip(functions, loops, strict=True))
    # A program needs time for the memory of its first iteration, which a fused step needs once.
    counts = {}
    for name, run in runs.items():
        _time(run, 1)
        counts[name] = max(8, int(SECONDS / max(_time(run, 4) / 4, 1e-7)))
    seconds: dict[str, float] = {}
    for _ in range(ROUNDS):
        fastest = min(seconds.values(), default=math.inf)
        for name, run in runs.items():
            if seconds.get(name, 0) <= HOPELESS * fastest:
                once = _time(run, counts[name]) / counts[name]
                seconds[name] = min(once, seconds.get(name, math.inf))
    return seconds


def _compile_loop(
    fn: Callable[..., jax.Array], x: jax.Array, w: jax.Array, out: jax.Array
) -> Callable[[int], Any]:
    """Returns a program that evaluates a function a number of times.

    The smaller operand of each iteration depends on the result of the one before, so that the
    compiler cannot take the function out of the loop.
    """

    def loop(n: jax.Array, x: jax.Array, w: jax.Array, out: jax.Array) -> jax.Array:
        def body(_: Any, state: Any) -> Any:
            x, w, out = state
            x, w = (tie(x, out), w) if x.size < w.size else (x, tie(w, out))
            return x, w, fn(x, w)

        return lax.fori_loop(0, n, body, (x, w, out))[2]

    compiled = jax.jit(loop).lower(np.int32(1), x, w, out).compile()
    return lambda n: jax.block_until_ready(compiled(np.int32(n), x, w, out))


def _time(run: Callable[[int], Any], n: int) -> float:
    start = time.perf_counter()
    run(n)
    return time.perf_counter() - start


class Sample(NamedTuple):
    """A measured plan.

    Attributes:
      conv: The convolution.
      plan: The plan.
      seconds: The time of one evaluation.
    """

    conv: Convolution
    plan: _plan.Plan
    seconds: float


# What the quantities cost on a machine of 2026 with two cores, in seconds. The fit is drawn to
# these weights where the measurements do not say more.
PRIOR = {
    "calls": 4e-6, "slices": 5e-7, "blocks": 1e-5, "products": 6e-12, "lanes": 6e-12,
    "serial": 1e-11,
    "segments": 2e-9, "odd": 5e-10, "large": 4e-10, "parts": 1.0,
}  # fmt: skip
PRIOR_OF_ELEMENTS = 3e-10
PRIOR_STRENGTH = 0.05


class Measured(NamedTuple):
    """A convolution that was measured.

    Attributes:
      conv: The convolution.
      samples: Its plans with their times, by name.
      own: Seconds of XLA's own kernel, as jax writes the convolution or in the canonical layout,
        whichever is faster.
    """

    conv: Convolution
    samples: dict[str, Sample]
    own: float


def load(path: pathlib.Path) -> list[Measured]:
    """Returns the convolutions of a file of measurements."""
    return [_from_row(json.loads(line)) for line in path.read_text().splitlines()]


def _to_row(eqn: Any, seconds: dict[str, float]) -> dict[str, Any]:
    conv = describe(*(var.aval for var in eqn.invars), eqn.params)
    fields = conv._asdict() | {"dtype": conv.dtype.name, "out_dtype": conv.out_dtype.name}
    return {"conv": fields | {"precision": None}, "seconds": seconds}


def _from_row(row: dict[str, Any]) -> Measured:
    fields = {name: _as_tuple(value) for name, value in row["conv"].items()}
    for name in ("dtype", "out_dtype"):
        fields[name] = jnp.dtype(fields[name])
    conv, seconds = Convolution(**fields), row["seconds"]
    samples = {}
    for plan in each_plan(conv):
        if plan.name in seconds:
            samples[plan.name] = Sample(conv, plan, seconds[plan.name])
    own = min(seconds.get(name, math.inf) for name in ("as written", "canonical"))
    return Measured(conv, samples, own)


def _as_tuple(value: Any) -> Any:
    return tuple(map(_as_tuple, value)) if isinstance(value, list) else value


def fit(samples: Sequence[Sample]) -> dict[str, dict[str, float]]:
    """Returns the weights of all methods."""
    weights: dict[str, dict[str, float]] = {}
    for has_parts in (False, True):
        groups: dict[str, list[tuple[dict[str, float], float]]] = collections.defaultdict(list)
        for sample in map(_without_trimming, samples):
            conv, plan = sample.conv, sample.plan
            if bool(plan.parts) != has_parts:
                continue
            parts = sum(
                count * _estimate(weights, part, plan.parts[part])
                for part, count in plan.method.parts(conv)
            )
            features = {**plan.method.features(conv), "parts": parts}
            groups[_plan.weights_key(plan.method.name, conv)].append((features, sample.seconds))
        weights |= {key: _fit_weights(group) for key, group in groups.items()}
    return weights


def _without_trimming(sample: Sample) -> Sample:
    """Returns the sample of what remains after trimming, which itself takes next to no time."""
    if sample.plan.method is not trimmed:
        return sample
    ((conv, plan),) = sample.plan.parts.items()
    return Sample(conv, plan, sample.seconds)


def _estimate(weights: Any, conv: Convolution, plan: _plan.Plan) -> float:
    parts = sum(
        count * _estimate(weights, part, plan.parts[part])
        for part, count in plan.method.parts(conv)
    )
    if plan.method is trimmed:
        return parts
    features = {**plan.method.features(conv), "parts": parts}
    # Kinds that were not measured have the weights of the prior.
    by_name = weights.get(_plan.weights_key(plan.method.name, conv)) or _prior(features)
    return sum(by_name[name] * value for name, value in features.items())


def _prior(features: Iterable[str]) -> dict[str, float]:
    return {name: PRIOR.get(name, PRIOR_OF_ELEMENTS) for name in features}


def _fit_weights(group: Sequence[tuple[dict[str, float], float]]) -> dict[str, float]:
    """Returns positive weights with small logarithmic errors; large errors count less."""
    names = sorted({name for features, _ in group for name in features})
    matrix = np.array([[features[name] for name in names] for features, _ in group])
    times = np.log([seconds for _, seconds in group])
    prior = np.log(list(_prior(names).values()))

    def errors(logs: np.ndarray) -> np.ndarray:
        difference = np.log(matrix @ np.exp(logs)) - times
        return np.concatenate([np.arctan(2 * difference) / 2, PRIOR_STRENGTH * (logs - prior)])

    logs = optimize.least_squares(errors, prior).x
    return {name: float(f"{value:.3g}") for name, value in zip(names, np.exp(logs), strict=True)}


def regret(measured: Sequence[Measured]) -> Any:
    """Returns the time of the chosen plan over the best one's, and over XLA's, of each."""
    ratios = []
    for conv, samples, own in measured:
        plan = _plan.best_plan(conv)
        # A plan that was too slow to be measured to the end is missing.
        if plan and plan.name in samples:
            chosen = samples[plan.name].seconds
            ratios.append((chosen / min(s.seconds for s in samples.values()), chosen / own))
    return np.array(ratios)


def main(argv: Sequence[str] | None = None) -> None:
    """Runs one of the three commands."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("command", choices=["measure", "fit", "regret"])
    parser.add_argument("--first", type=int, default=0, help="the seed of the first layer")
    parser.add_argument("--layers", type=int, default=150, help="the number of layers")
    parser.add_argument("--file", type=pathlib.Path, default=OUTPUT, help="the measurements")
    args = parser.parse_args(argv)
    if args.command == "measure":
        _measure_layers(range(args.first, args.first + args.layers), args.file)
    elif args.command == "fit":
        measured = load(args.file)
        samples = [sample for each in measured for sample in each.samples.values()]
        WEIGHTS.write_text(json.dumps(report.about() | {"weights": fit(samples)}, indent=1))
    else:
        _print_regret(regret(load(args.file)))


def _measure_layers(seeds: range, file: pathlib.Path) -> None:
    """Appends a line for each convolution; layers that are in the file already are left out."""
    file.parent.mkdir(parents=True, exist_ok=True)
    lines = file.read_text().splitlines() if file.exists() else []
    done = {json.loads(line)["seed"] for line in lines}
    for seed in sorted(set(seeds) - done):
        rows = [{"seed": seed} | _to_row(eqn, measure(eqn)) for eqn in equations(draw(seed))]
        with file.open("a") as stream:
            stream.writelines(json.dumps(row) + "\n" for row in rows)
        jax.clear_caches()


def _print_regret(ratios: Any) -> None:
    of_best, of_own = ratios.T
    print(f"{len(ratios)} convolutions, {report.machine()}, jax {jax.__version__}")
    median, most = np.quantile(of_best, [0.5, 0.95])
    print(f"time of the chosen plan over the best one's: median {median:.2f}, 95 % {most:.2f}")
    print(f"more than 1.2 times XLA's own: {np.mean(of_own > 1.2):.1%}")
    print(f"median of XLA's own time over that of the chosen plan: {np.median(1 / of_own):.2f}")


if __name__ == "__main__":
    main()
