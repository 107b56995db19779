"""The parts of `benchmarks.gpu`, each of which runs in a process of its own.

A part is a function ``part(quick, rounds)`` that yields the name of a result, and the result.
"""

import dataclasses
import functools
import os
import pathlib
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import keras
import numpy as np

import functrain as ft
from benchmarks import jax_ways, keras_ways
from benchmarks.jax_ways import by_hand, functrain_parts
from benchmarks.workloads import WORKLOADS as KNOWN
from benchmarks.workloads import Arrays, Workload, in_float32, language_model, tokens

WORKLOADS = ["digits-mlp", "mnist-mlp", "mnist-convnet", "transformer"]
KS = [1, 8, 32, 128]
LEAVES = [4, 40, 400]
MEMBERS = [1, 32, 256]
WARM_UPS = 3

MIXED: Any = {"big": True, "policy": "mixed_bfloat16"}

# The name of a result, and numbers or texts by name.
Result = tuple[str, Any]
Run = Callable[[], Any]


def device(quick: bool, rounds: int) -> Iterator[Result]:
    """Yields the device's name, memory and target configuration, and the versions of JAX."""
    with tempfile.TemporaryDirectory() as folder:
        # XLA writes the configuration of a GPU beside every program that it dumps. With its text,
        # `functrain.target` compiles for this GPU on other machines.
        os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} --xla_dump_to={folder}"
        first = jax.devices()[0]
        yield "kind", first.device_kind
        yield "platform", first.platform
        yield "versions", {m.__name__: m.__version__ for m in (jax, keras, ft)}
        yield "memory", first.memory_stats() or {}
        jax.jit(lambda x: x + 1)(0.0).block_until_ready()
        configs = sorted(pathlib.Path(folder).glob("*.gpu_target_config.pbtxt"))
        yield "target_config", configs[0].read_text() if configs else ""


def dispatch(quick: bool, rounds: int) -> Iterator[Result]:
    """Times calls of small programs by their number of leaves, beside `jax.jit` and a scan."""

    def step(state: Any, batch: Any) -> Any:
        return jax.tree.map(lambda x: x + batch, state), {"loss": jnp.sum(batch)}

    calls = 20 if quick else 300
    for leaves in LEAVES[: 2 if quick else None]:
        state, batch = [jnp.zeros(8)] * leaves, jnp.ones(8)
        ways = {"jit": _passes(jax.jit(step, donate_argnums=0), state, [batch] * calls)}
        for k in (1, 8):
            chunks = [jnp.ones((k, 8))] * calls
            by_hand = jax.jit(functools.partial(jax.lax.scan, step), donate_argnums=0)
            ways[f"scan of {k}"] = _passes(by_hand, state, chunks)
            ways[f"fused {k}"] = _passes(ft.fuse(step, k), state, chunks)
        yield f"{leaves} leaves", _timed(ways, calls, rounds, "µs a call")


def steps(quick: bool, rounds: int) -> Iterator[Result]:
    """Times a step of each workload for each K, and in loops written by hand."""
    for name in WORKLOADS:
        n = 8 if quick else (1024 if name.endswith("mlp") else 128)
        workload = _sized(name, n)
        ks = [k for k in KS if k <= n]
        timed = _timed(_made(_programs(workload, ks, min(n, 32))), n, rounds)
        (x, y), (state, step) = workload.data(), functrain_parts(workload)
        batch = x[: workload.batch], y[: workload.batch]
        cost = ft.inspect.cost(state, step, batch, fuse=min(n, 32))
        yield name, {**timed, "kernels a step": cost.kernels, "estimated seconds": cost.seconds}


def flagged(quick: bool, rounds: int) -> Iterator[Result]:
    """Times single steps and fused steps with the XLA flags of this process."""
    for name in WORKLOADS[: 2 if quick else None]:
        n = 8 if quick else 128
        k = min(n, 32)
        yield name, _timed(_made(_programs(_sized(name, n), [1, k], k)), n, rounds)


def fit(quick: bool, rounds: int) -> Iterator[Result]:
    """Times `functrain.fit`, `bridge.fit` and Keras's `fit`, end to end."""
    for name in WORKLOADS[: 1 if quick else None]:
        n = 8 if quick else (1024 if name.endswith("mlp") else 256)
        workload = _sized(name, n)
        ways: dict[str, Run] = {
            "functrain.fit": jax_ways.functrain_fit(workload),
            "bridge.fit": jax_ways.bridge_fit(workload),
            "Keras fit": keras_ways.keras_fit(workload),
            "Keras fit, steps_per_execution=32": keras_ways.keras_fit_32(workload),
        }
        yield name, _timed(ways, n, min(rounds, 3))


def torch(quick: bool, rounds: int) -> Iterator[Result]:
    """Times plain PyTorch with data on the device, as it is, compiled and as one CUDA graph."""
    makers = _torch_ways()
    if not makers:
        yield "left out", "needs PyTorch"
    for name in WORKLOADS[: 1 if quick else None] if makers else []:
        n = 8 if quick else (1024 if name.endswith("mlp") else 128)
        ways = {way: make(_sized(name, n)) for way, make in makers.items()}
        yield name, _timed(ways, n, rounds)


def _torch_ways() -> dict[str, Callable[[Workload], Run]]:
    """Returns the ways of PyTorch by name; none where it is not installed."""
    try:
        from benchmarks import torch_ways
    except ImportError:
        return {}
    ways = {"torch-eager": torch_ways.torch_eager, "torch-compile": torch_ways.torch_compile}
    if torch_ways.DEVICE.type == "cuda":
        ways["torch-graph"] = torch_ways.torch_graph
    return ways


def gpt2(quick: bool) -> Workload:
    """Returns GPT-2 of 124M parameters with an untied head, or a small one."""
    length, width, blocks, heads, vocabulary = (
        (32, 64, 2, 4, 256) if quick else (1024, 768, 12, 12, 50_304)
    )
    build = functools.partial(language_model, length, width, blocks, heads, vocabulary, bias=False)
    batch, steps = (2, 8) if quick else (16, 16)
    return Workload("gpt2", batch, steps, build, tokens(length, vocabulary), **MIXED)


def resnet50(quick: bool) -> Workload:
    """Returns ResNet50 for images of bytes at the size of ImageNet, or for small ones."""
    size, classes, batch = (32, 10, 2) if quick else (224, 1000, 256)

    def build() -> keras.Model:
        inputs = keras.Input((size, size, 3), dtype="uint8")
        x = keras.layers.Rescaling(1 / 127.5, -1)(inputs)
        net = keras.applications.ResNet50(
            input_tensor=x, weights=None, classes=classes, classifier_activation=None
        )
        return keras.Model(inputs, in_float32(net.output))

    def photos(n: int) -> Arrays:
        rng = np.random.default_rng(0)
        x = rng.integers(256, size=(n, size, size, 3), dtype=np.uint8)
        return x, rng.integers(classes, size=n, dtype=np.int32)

    return Workload("resnet50-224", batch, 8, build, photos, **MIXED)


LARGE = {"gpt2": gpt2, "resnet50-224": resnet50}


def large(name: str, way: str, quick: bool, rounds: int) -> Iterator[Result]:
    """Times one way of a large model, its first epoch, and its peak of memory."""
    workload = LARGE[name](quick)
    start = time.perf_counter()
    if way.startswith("torch"):
        make = _torch_ways().get(way)
        if make is None:
            needs = "PyTorch and a GPU" if way == "torch-graph" else "PyTorch"
            yield "left out", f"needs {needs}"
            return
        run = make(workload)
    elif way in ("fused", "jit-loop", "scan"):
        ways = _programs(workload, [8] if way == "fused" else [], 8)
        run = next(make() for key, make in ways.items() if key.startswith(way))
    else:
        module = keras_ways if way == "keras-fit" else jax_ways
        run = getattr(module, way.replace("-", "_"))(workload)
    yield "seconds to prepare", time.perf_counter() - start
    start = time.perf_counter()
    run()
    yield "seconds of the first epoch", time.perf_counter() - start
    timed = _timed({way: run}, workload.steps, min(rounds, 4), "ms a step", 1e3, warm_ups=1)
    yield way, timed[way]
    if (memory := jax.devices()[0].memory_stats()) and not way.startswith("torch"):
        yield "peak GiB", memory["peak_bytes_in_use"] / 2**30
    if way == "fused":
        state, step = jax_ways.functrain_parts(workload)
        batch = jax.tree.map(lambda x: x[: workload.batch], workload.data())
        yield "estimated GiB", ft.inspect.memory(state, step, batch, fuse=8).total / 2**30
        chunk = jax.tree.map(lambda x: x[None], batch)
        text = ft.fuse(step, 1).lower(step.start(state), chunk, 1).as_text()
        # Keras uses cuDNN's attention for half precision, if the device of this process has it.
        yield "cuDNN attention", text.count("__cudnn$fmha")


def without_cudnn(name: str, way: str, quick: bool, rounds: int) -> Iterator[Result]:
    """Times one way of a large model with XLA's attention instead of cuDNN's."""
    keras.config.disable_flash_attention()
    return large(name, way, quick, rounds)


def independence(quick: bool, rounds: int) -> Iterator[Result]:
    """Compares the params after 128 steps, bit for bit, between each K and single steps."""
    for name in WORKLOADS[: 2 if quick else None]:
        n = 8 if quick else 128
        epoch = _on_device(_sized(name, n))
        state, step = functrain_parts(_sized(name, n))

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

        by_k = {k: trained(k) for k in (1, 7, 8, 32, 128) if k <= n}
        differences = {"8, repeated": _difference(by_k[8], trained(8))}
        yield name, differences | {f"K={k}": _difference(by_k[1], by_k[k]) for k in by_k}


def _difference(a: list[Any], b: list[Any]) -> str:
    if all(x.tobytes() == y.tobytes() for x, y in zip(a, b, strict=True)):
        return "equal bits"
    largest = max(float(np.max(np.abs(x - y))) for x, y in zip(a, b, strict=True))
    return f"differs by up to {largest:.2g}"


def populations(quick: bool, rounds: int) -> Iterator[Result]:
    """Times a step of a whole population, for several sizes."""
    k = 8 if quick else 32
    for name in ("digits-mlp", "mnist-mlp"):
        workload = _sized(name, k if quick else 256)
        epoch = _on_device(workload)
        state, step = functrain_parts(workload)
        over_members, ways = ft.population.step(step), {}
        for members in MEMBERS[: 2 if quick else None]:
            started = over_members.start(ft.population.stack([state] * members))
            ways[f"{members} members"] = _passes(ft.fuse(over_members, k), started, _cut(epoch, k))
        yield name, _timed(ways, workload.steps, rounds)


def _sized(name: str, steps: int) -> Any:
    """Returns a workload with so many steps."""
    return dataclasses.replace(KNOWN[name], steps=steps)


def _programs(workload: Any, ks: list[int], k_by_hand: int) -> dict[str, Callable[[], Run]]:
    """Returns functions that make passes over an epoch on the device.

    Fused for each K; a jitted step in a loop; and a scan of K steps, both written by hand.
    """

    def fused(k: int) -> Run:
        state, step = functrain_parts(workload)
        return _passes(ft.fuse(step, k), step.start(state), _cut(_on_device(workload), k))

    def looped() -> Run:
        carry, step = by_hand(workload)
        epoch = _on_device(workload)
        batches = [jax.tree.map(lambda x, i=i: x[i], epoch) for i in range(workload.steps)]
        single = jax.jit(lambda c, batch: (step(c, batch), None), donate_argnums=0)
        return _passes(single, carry, batches)

    def scanned() -> Run:
        carry, step = by_hand(workload)

        def program(carry: Any, chunk: Any) -> Any:
            return jax.lax.scan(lambda c, batch: (step(c, batch), None), carry, chunk)

        chunks = _cut(_on_device(workload), k_by_hand)
        return _passes(jax.jit(program, donate_argnums=0), carry, chunks)

    ways = {f"fused {k}": functools.partial(fused, k) for k in ks}
    return {**ways, "jit-loop": looped, f"scan {k_by_hand} by hand": scanned}


def _made(ways: dict[str, Callable[[], Run]]) -> dict[str, Run]:
    return {name: make() for name, make in ways.items()}


def _on_device(workload: Any) -> Any:
    """Returns the batches of an epoch, every leaf `[steps, B, ...]`, on the device."""
    n, batch = workload.steps, workload.batch
    return jax.tree.map(
        lambda x: jax.device_put(x.reshape(n, batch, *x.shape[1:])), workload.data()
    )


def _cut(epoch: Any, k: int) -> list[Any]:
    """Returns the full chunks of K batches; a smaller last chunk is left out."""
    n = len(jax.tree.leaves(epoch)[0])
    return [jax.tree.map(lambda x, i=i: x[i : i + k], epoch) for i in range(0, n - k + 1, k)]


def _passes(program: Any, carry: Any, chunks: list[Any]) -> Run:
    """Returns a function that runs a program on all chunks and waits for the result."""
    carry = jax.tree.map(lambda x: x.copy(), carry)

    def run() -> None:
        nonlocal carry
        for chunk in chunks:
            carry, _ = program(carry, chunk)
        jax.block_until_ready(carry)

    return run


def _timed(
    ways: dict[str, Run],
    n: int,
    rounds: int,
    unit: str = "µs a step",
    scale: float = 1e6,
    warm_ups: int = WARM_UPS,
) -> dict[str, Any]:
    """Returns the time per step of each way: the median, and those of each round."""
    for run in ways.values():
        for _ in range(warm_ups):
            run()
    times: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(rounds):
        for name, run in ways.items():
            start = time.perf_counter()
            run()
            times[name].append((time.perf_counter() - start) / n * scale)
    return {
        name: {unit: statistics.median(each), "rounds": [round(t, 3) for t in each]}
        for name, each in times.items()
    }
