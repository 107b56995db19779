"""Measures convolutions of random layers, and how good the choice of rewrites is for them.

`python -m benchmarks.rewrites regret` is the command. The layers have one to three axes, batches of
1 to 256, groups, strides and dilations, are transposed or not, and compute in float32 or bfloat16.
Each is measured with both its gradients in the body of a loop, as in a fused step: as jax writes
it, in the canonical layout, with all rewrites, without each of those that apply, and with rewrites
that the rules did not choose. Regret is the time with the chosen rewrites over that of the fastest
program. The programs take turns.
"""

import concurrent.futures
import functools
import json
import math
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend import core
from rich.table import Table

from benchmarks import report
from benchmarks.operations import tied
from functrain.rewrites import _optimize
from functrain.rewrites._pass import rewrite_jaxpr
from functrain.rewrites._rewrite import Rewrite
from functrain.rewrites.canonical_conv import canonical_conv
from functrain.rewrites.patch_conv import MAX_TAPS, patch_conv

KINDS = ["plain"] * 5 + ["strided"] * 2 + ["dilated", "transposed", "transposed", "grouped"]
KINDS += ["depthwise"] * 2
BATCHES = [1, 2, 4, 8, 16, 32, 64, 128, 256]
SIZES = [1, 2, 3, 4, 5, 7, 8, 10, 13, 14, 16, 20, 28, 32, 48, 56, 64, 96, 112, 128]
VOLUME_SIZES = [2, 4, 6, 8, 12, 16, 24, 32]
CHANNELS = [1, 2, 3, 4, 8, 16, 24, 32, 48, 64, 96, 128, 160, 192, 256, 384, 512, 768, 1024]
MIN_PRODUCTS, MAX_PRODUCTS, MAX_ELEMENTS = 2**17, 2**29, 2**23
# Seconds of one measurement of a convolution, and how many there are.
CONV_SECONDS, CONV_ROUNDS = 0.012, 5
# After the first round, programs that take longer than this times the fastest are left out.
HOPELESS = 3
# A program whose first iteration takes longer, in seconds, is not run again.
MAX_SECONDS = 1


class Layer(NamedTuple):
    """A convolution `[N, *S, C]` x `[*W, I, O]`."""

    image: tuple[int, ...]
    kernel: tuple[int, ...]
    dtype: str
    options: dict[str, Any]

    def __call__(self, x: jax.Array, w: jax.Array) -> jax.Array:
        """Convolves an image with a kernel."""
        return lax.conv_general_dilated(x, w, **self.options)

    @property
    def types(self) -> list[jax.ShapeDtypeStruct]:
        """Returns the types of an image and a kernel."""
        return [jax.ShapeDtypeStruct(shape, self.dtype) for shape in (self.image, self.kernel)]


def draw(seed: int) -> Layer:
    """Returns a layer of a size that takes between some microseconds and some milliseconds."""
    rng = np.random.default_rng(seed)
    while not _is_measurable(layer := _draw(rng)):
        pass
    return layer


def _draw(rng: np.random.Generator) -> Layer:
    rank = int(rng.choice([1, 2, 2, 2, 2, 3]))
    size = int(rng.choice(SIZES if rank < 3 else VOLUME_SIZES))
    if rank == 1:
        size *= int(rng.choice([1, 2, 8]))
    batch, inputs, outputs = (int(rng.choice(sizes)) for sizes in (BATCHES, CHANNELS, CHANNELS))
    taps = int(rng.choice([1, 2, 3, 3, 3, 3, 4, 5, 5, 7] if rank < 3 else [1, 2, 3, 3, 3, 5]))
    kind = str(rng.choice(KINDS))
    stride, holes, groups = 1 + (kind == "strided"), 1 + (kind == "transposed"), 1
    if kind == "grouped":
        groups = int(rng.choice([2, 4, 8, 16, 32]))
        inputs, outputs = (max(side // groups, 2) * groups for side in (inputs, outputs))
    if kind == "depthwise":
        groups, outputs = inputs, inputs * int(rng.choice([1, 1, 1, 2]))
        stride = int(rng.choice([1, 1, 2]))
    padding: Any = str(rng.choice(["SAME", "SAME", "VALID"]))
    if kind == "transposed":
        same = (taps - 1 - (taps - 2) // 2 if taps > 1 else 0, taps // 2)
        padding = [same if padding == "SAME" else (taps - 1, taps - 1)] * rank
    spatial = "DHW"[3 - rank :]
    options = {
        "window_strides": (stride,) * rank,
        "padding": padding,
        "lhs_dilation": (holes,) * rank,
        "rhs_dilation": (1 + (kind == "dilated"),) * rank,
        "feature_group_count": groups,
        "dimension_numbers": (f"N{spatial}C", f"{spatial}IO", f"N{spatial}C"),
    }
    dtype = str(rng.choice(["float32", "float32", "bfloat16"]))
    kernel = (*[taps] * rank, inputs // groups, outputs)
    return Layer((batch, *[size] * rank, inputs), kernel, dtype, options)


def _is_measurable(layer: Layer) -> bool:
    out = jax.eval_shape(layer, *layer.types)
    products = out.size * math.prod(layer.kernel[:-1])
    elements = max(out.size, math.prod(layer.image), math.prod(layer.kernel))
    return MIN_PRODUCTS <= products <= MAX_PRODUCTS and elements <= MAX_ELEMENTS


def equations(layer: Layer) -> list[core.JaxprEqn]:
    """Returns the equations of a layer and of the gradients of its kernel and its image."""

    def fn(x: jax.Array, w: jax.Array, g: jax.Array) -> tuple[jax.Array, ...]:
        out, pull = jax.vjp(layer, x, w)
        return out, *pull(g)

    jaxpr = jax.make_jaxpr(fn)(*layer.types, jax.eval_shape(layer, *layer.types)).jaxpr
    return [eqn for eqn in jaxpr.eqns if eqn.primitive.name == "conv_general_dilated"]


def _can_take_patches(eqn: core.JaxprEqn) -> bool:
    window = [
        eqn.invars[1].aval.shape[axis] for axis in eqn.params["dimension_numbers"].rhs_spec[2:]
    ]
    is_grouped = eqn.params["feature_group_count"] * eqn.params["batch_group_count"] > 1
    return math.prod(window) <= MAX_TAPS and not is_grouped


def _rule_sets() -> dict[str, tuple[Rewrite, ...]]:
    """Returns the sets of rules that are compared, by name."""
    rules = _optimize.rules_for("cpu")
    patches = patch_conv._replace(applies=_can_take_patches)
    sets = {
        "as jax writes it": (),
        "canonical": (canonical_conv,),
        "all rules": rules,
        "patches": (patches, *rules),
    }
    for rule in rules:
        if rule.primitive is canonical_conv.primitive:
            sets[f"without {rule.name}"] = tuple(each for each in rules if each is not rule)
    return sets


def measure(eqn: core.JaxprEqn) -> dict[str, float]:
    """Returns the seconds of a convolution with each set of rules, in the body of a loop."""
    rng = np.random.default_rng(0)
    x, w = (jnp.asarray(rng.standard_normal(v.aval.shape), v.aval.dtype) for v in eqn.invars)
    out = jnp.zeros(eqn.outvars[0].aval.shape, eqn.outvars[0].aval.dtype)
    closed = jax.make_jaxpr(lambda x, w: eqn.primitive.bind(x, w, **eqn.params))(x, w)
    jaxprs = {name: rewrite_jaxpr(closed, rules) for name, rules in _rule_sets().items()}
    # Programs that are alike are measured once.
    names: dict[str, list[str]] = {}
    for name, jaxpr in jaxprs.items():
        names.setdefault(str(jaxpr), []).append(name)
    distinct = [jaxprs[alike[0]] for alike in names.values()]
    with concurrent.futures.ThreadPoolExecutor() as pool:
        runs = list(pool.map(lambda jaxpr: _compile_loop(jaxpr, x, w, out), distinct))
    seconds = _measure_in_turn(runs)
    return {name: seconds[i] for i, alike in enumerate(names.values()) for name in alike}


def _compile_loop(jaxpr: Any, x: jax.Array, w: jax.Array, out: jax.Array) -> Callable[[int], Any]:
    """Returns a program that evaluates a jaxpr a number of times.

    Both operands of each iteration depend on the result of the one before. Otherwise the compiler
    would take the transpose of one operand, or its patches, out of the loop. The barrier makes it
    compute both operands before the convolution. Otherwise it would repeat the addition in `tied`
    for each product, if a rewrite consists of elementwise operations.
    """
    evaluate: Any = core.jaxpr_as_fun(jaxpr)

    def loop(n: jax.Array, x: jax.Array, w: jax.Array, out: jax.Array) -> jax.Array:
        def body(_: Any, state: Any) -> Any:
            x, w, out = state
            x, w = lax.optimization_barrier((tied(x, out), tied(w, out)))
            return x, w, *evaluate(x, w)

        return lax.fori_loop(0, n, body, (x, w, out))[2]

    compiled = jax.jit(loop).lower(np.int32(1), x, w, out).compile()
    return lambda n: jax.block_until_ready(compiled(np.int32(n), x, w, out))


def _measure_in_turn(runs: Sequence[Callable[[int], Any]]) -> list[float]:
    """Returns the least seconds of one iteration of each program."""
    counts, seconds = {}, [math.inf] * len(runs)
    for i, run in enumerate(runs):
        first = seconds_of(functools.partial(run, 1))
        if first > MAX_SECONDS:
            seconds[i] = first
            continue
        # The first iteration needs time for its memory, which a fused step needs only once.
        once = seconds_of(functools.partial(run, 4)) / 4
        counts[i] = max(8, math.ceil(CONV_SECONDS / max(once, 1e-7)))
    for _ in range(CONV_ROUNDS):
        fastest = min(seconds)
        for i, count in counts.items():
            if seconds[i] == math.inf or seconds[i] <= HOPELESS * fastest:
                duration = seconds_of(functools.partial(runs[i], count)) / count
                seconds[i] = min(seconds[i], duration)
    return seconds


def seconds_of(run: Callable[[], Any]) -> float:
    """Returns the seconds of a run."""
    start = time.perf_counter()
    run()
    return time.perf_counter() - start


def measure_layers(seeds: Sequence[int]) -> list[dict[str, float]]:
    """Returns the seconds of all convolutions of drawn layers, and adds them to regret.jsonl."""
    measured = []
    report.OUTPUT.mkdir(parents=True, exist_ok=True)
    with (report.OUTPUT / "regret.jsonl").open("a") as file:
        for seed in seeds:
            for eqn in equations(draw(seed)):
                measured.append(measure(eqn))
                file.write(json.dumps({"seed": seed, "seconds": measured[-1]}) + "\n")
                file.flush()
            jax.clear_caches()
    return measured


def summarize(measured: Sequence[dict[str, float]]) -> Table:
    """Returns a table of the regret."""
    chosen = np.array([each["all rules"] for each in measured])
    best = np.array([min(each.values()) for each in measured])
    xla = np.array([min(each["as jax writes it"], each["canonical"]) for each in measured])
    table = Table(title=f"Regret of the rewrites over {len(measured)} convolutions")
    table.add_column("quantity")
    table.add_column("value", justify="right")
    median, most = np.quantile(chosen / best, [0.5, 0.95])
    table.add_row("time over the fastest program's, median", f"{median:.2f}")
    table.add_row("the same, 95th percentile", f"{most:.2f}")
    table.add_row("more than 1.2 times XLA's own time", f"{np.mean(chosen > 1.2 * xla):.1%}")
    table.add_row(
        "XLA's own time over that of the rewrites, median", f"{np.median(xla / chosen):.2f}"
    )
    table.add_row(
        "total of XLA's own time over that of the rewrites", f"{xla.sum() / chosen.sum():.2f}"
    )
    return table
