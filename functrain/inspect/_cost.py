"""The cost of a step on a device, as its compiler estimates it, before anything runs."""

import collections
import dataclasses
import math
import re
from typing import Any, NamedTuple

import jax
from jax.extend.core import primitives

from functrain.common import _hlo, _repr, _tree
from functrain.common._platform import compiling_for, platform_of
from functrain.common._table import sheet
from functrain.common._types import PyTree, Step
from functrain.engine import _placement
from functrain.engine._guards import tracing_guards
from functrain.inspect._fit_program import lower_fit
from functrain.rewrites import Mode
from functrain.rewrites._equations import avals, walk_equations
from functrain.sharding._collectives import Traffic, collectives
from functrain.targets._chips import Chip
from functrain.targets._target import Target

# A program is started from Python; functrain's own loop takes about this long for that.
DISPATCH_SECONDS = 100e-6
# The least time that a GPU takes for a kernel, however small.
KERNEL_SECONDS = 2e-6
# Rows of the printed table; all layers are in `Cost.layers`.
ROWS = 12

# Products in cuDNN's attention, for which jax exports no primitives, and in its gradient. That
# which its gradient computes again does not count.
_PRODUCTS_OF_ATTENTION = {
    "dot_product_attention_fwd_wrapper": 2,
    "dot_product_attention_bwd_wrapper": 4,
}

# What jax adds to the names of a user's functions and scopes.
_WRAPPERS = re.compile(
    r"\b(?:jit|pjit|jvp|transpose|vmap|remat|checkpoint|custom_jvp|custom_vjp|shard_map)\(([^()]*)\)"
)
# Parts of a name that control flow adds, or empty ones, which remain of wrappers such as `jvp()`.
_PARTS_OF_CONTROL_FLOW = re.compile(
    r"(?:while|body|cond|scan|closed_call|eval_jaxpr|rematted_computation|branch_\d+_fun)?"
)


class Layer(NamedTuple):
    """The part of a step that belongs to one layer or scope of the model.

    Attributes:
      name: Its path, such as ``resnet50/conv1_conv``; "loss" for what the loss does outside of any
        layer, "optimizer", "metrics", and "other".
      seconds: Estimated time of a step; 0 if the compiler estimates no times.
      kernels: Kernels of a step.

    Examples:
      >>> Layer("mlp/dense", 2e-6, 3.0).kernels
      3.0
    """

    name: str
    seconds: float
    kernels: float


@dataclasses.dataclass(frozen=True)
class Cost:
    """The cost of a step on each device, from `cost`. Prints as a table.

    All of it is estimated from the compiled program. Nothing was measured.

    Attributes:
      k: Steps per program.
      chip: The device.
      seconds: Estimated time of a step on the device, without the host; NaN if it is unknown.
      basis: What `seconds` is estimated from.
      kernels: Kernels of a step.
      flops: Operations of the products and convolutions of a step, on all devices. Those that
        `jax.checkpoint` repeats count again; a causal attention counts in full; Pallas's kernels
        do not count.
      devices: How many devices share them.
      layers: The parts of the step, the largest first.
      traffic: The data that the devices send to each other in a step, by kind of collective.

    Examples:
      >>> import functrain as ft, jax.numpy as jnp
      >>> def step(state, batch):
      ...     return state + jnp.mean(batch @ batch.T), {}
      >>> found = ft.inspect.cost(jnp.zeros(()), step, jnp.ones((32, 64)), fuse=4)
      >>> found.k, found.flops
      (4, 131072)
    """

    k: int
    chip: Chip
    seconds: float
    basis: str
    kernels: float
    flops: int
    devices: int
    layers: tuple[Layer, ...]
    traffic: dict[str, Traffic]

    @property
    def dispatch_saved(self) -> float:
        """The part of the time of single steps that fusing K steps saves; NaN if it is unknown."""
        saved = DISPATCH_SECONDS * (1 - 1 / self.k)
        return saved / (self.seconds + DISPATCH_SECONDS)

    @property
    def utilization(self) -> float:
        """The part of the peak in bfloat16 that the step would reach; NaN if that is unknown."""
        peak = self.chip.peak_flops * self.devices * self.seconds
        return self.flops / peak if peak else math.nan

    def __repr__(self) -> str:
        return f"Cost({_format_time(self.seconds)} a step on {self.chip.name}, k={self.k})"

    def _repr_pretty_(self, printer: Any, cycle: bool) -> None:
        """Shows the tables in a notebook, as `print` does."""
        printer.text(str(self))

    def __str__(self) -> str:
        """Returns the tables, at most 80 columns wide."""
        columns = ["layer", "kernels", "time", "share"]
        tables = [
            sheet(["estimated cost of a step", ""], self._summary()),
            sheet(columns, self._layer_rows(), numbers=columns[1:]),
        ]
        if self.traffic:
            columns = ["collective", "calls", "bytes"]
            rows = [
                (kind, str(calls), _repr.format_bytes(size))
                for kind, (calls, size) in self.traffic.items()
            ]
            tables.append(sheet(columns, rows, numbers=columns[1:]))
        return "\n".join(tables)

    def _summary(self) -> list[tuple[str, str]]:
        rows = [
            ("device", f"{self.devices} × {_repr.shorten_start(self.chip.name, 44)}"),
            ("time of a step", _format_time(self.seconds)),
            ("estimated from", self.basis),
            ("kernels", f"{self.kernels:.1f}"),
            ("FLOPs of products", f"{self.flops:,}"),
        ]
        if not math.isnan(self.utilization):
            rows.append(("of the peak in bfloat16", f"{self.utilization:.1%}"))
        if self.k > 1 and not math.isnan(self.dispatch_saved):
            saved = f"{self.dispatch_saved:.0%} of single steps' time"
            rows.append((f"saved by fusing {self.k} steps", saved))
        return rows

    def _layer_rows(self) -> list[tuple[str, ...]]:
        """Returns the name, kernels, time and share of each layer, small ones added up."""
        # Shares are those of the kernels where no times are known.
        has_times = any(layer.seconds for layer in self.layers)
        weights = [x.seconds if has_times else x.kernels for x in self.layers]
        rows: list[tuple[str, ...]] = []
        for layer, weight in zip(self.layers[:ROWS], weights, strict=False):
            seconds = _format_time(layer.seconds) if has_times else "-"
            share = f"{weight / sum(weights):.1%}"
            name = _repr.shorten_start(layer.name, 44)
            rows.append((name, f"{layer.kernels:.1f}", seconds, share))
        if len(self.layers) > ROWS:
            share = f"{sum(weights[ROWS:]) / sum(weights):.1%}"
            rows.append((f"{len(self.layers) - ROWS} others", "", "", share))
        return rows


def cost(
    state: PyTree,
    step: Step[Any],
    batch: PyTree,
    *,
    fuse: int | None = None,
    target: Target | None = None,
    sharding: _placement.ShardingArg = None,
    rewrites: Mode = "auto",
) -> Cost:
    """Returns the cost of a step as the compiler of its device estimates it. Nothing runs.

    The TPU compiler estimates the cycles of every kernel. For GPUs the time is a roofline: the
    larger of FLOPs by peak speed and bytes by bandwidth, and 2 µs for each kernel. The bytes are
    those that kernels write, twice, since what is written is also read. For CPUs there is no
    estimate of the time. Nothing was measured: compare estimates with each other.

    Args:
      state: The state, or its shapes.
      step: ``(state, batch) -> (state, logs)``, with metrics or without.
      batch: One batch of full size, or its shapes.
      fuse: Steps per program; None for the number that ``fuse="auto"`` chooses.
      target: The devices to compile for, from `functrain.target`; by default those on which the
        state is placed, or this machine.
      sharding: The sharding of one batch, as in `fit`.
      rewrites: As in `fit`.

    Returns:
      A `Cost`; print it for tables.

    Raises:
      jax.errors.JaxRuntimeError: The program is larger than the memory of the device; see `memory`.
      ValueError: `fuse` is below 1, or the batch does not divide over the devices.
      TypeError: `step` is not a step, or a leaf is not an array.

    Examples:
      >>> import functrain as ft, jax.numpy as jnp
      >>> def step(state, batch):
      ...     return state + jnp.mean(batch @ batch.T), {}
      >>> ft.inspect.cost(jnp.zeros(()), step, jnp.ones((32, 64)), fuse=4).kernels >= 0
      True
    """
    program = lower_fit(
        state, step, batch, fuse=fuse, target=target, sharding=sharding, rewrites=rewrites
    )
    text = program.lowered.compile().as_text() or ""
    # In a loop of unknown length, which a CPU has, every instruction was counted once.
    steps = 1 if platform_of(program.carry) == "cpu" else program.k
    layers, moved = _layers(text, program.chip, steps)
    flops = product_flops(trace_step(step, program.carry, _tree.shapes(batch)))
    shardings = [x.sharding for x in jax.tree.leaves(program.carry) if x.sharding is not None]
    devices = max((sharding.num_devices for sharding in shardings), default=1)
    kernels = sum(layer.kernels for layer in layers)
    seconds, basis = sum(layer.seconds for layer in layers), "the TPU compiler's cycles"
    if not seconds:
        seconds, basis = _roofline(program.chip, flops / devices, moved, kernels)
    return Cost(
        k=program.k,
        chip=program.chip,
        seconds=seconds,
        basis=basis,
        kernels=kernels,
        flops=flops,
        devices=devices,
        layers=tuple(layers),
        traffic={
            kind: Traffic(round(x.calls / steps), round(x.bytes / steps))
            for kind, x in collectives(text).items()
        },
    )


def _layers(text: str, chip: Chip, steps: int) -> tuple[list[Layer], float]:
    """Returns the layers of a step, the largest first, and the bytes that its kernels move.

    Args:
      text: The text of the compiled program.
      chip: The device.
      steps: The number of steps that the program was counted for.
    """
    cycles, kernels = collections.Counter[str](), collections.Counter[str]()
    moved = 0
    for instruction, calls in _hlo.instructions(text):
        name = layer_name(instruction.op_name)
        cycles[name] += calls * instruction.cycles
        if instruction.opcode in _hlo.KERNELS:
            kernels[name] += calls
            # What is written is also read, but such a kernel writes a part of its result in place.
            is_partial = "dynamic_update_slice" in instruction.name.replace("-", "_")
            moved += 0 if is_partial else 2 * calls * instruction.bytes
    # Without a clock, no layer has a time.
    clock = chip.clock_hz or math.inf
    layers = [
        Layer(name, cycles[name] / clock / steps, kernels[name] / steps)
        for name in cycles | kernels
        if cycles[name] / clock or kernels[name]
    ]
    layers.sort(key=lambda layer: (layer.seconds, layer.kernels), reverse=True)
    return layers, moved / steps


def layer_name(op_name: str) -> str:
    """Returns the layer or scope that an operation belongs to.

    Args:
      op_name: The names of scopes and transformations, and of the operation, as jax joins them.

    Examples:
      >>> layer_name("jit(run)/while/body/closed_call/transpose(jvp(mlp))/dense/dot_general")
      'mlp/dense'
      >>> layer_name("jit(run)/while/body/closed_call/eval_jaxpr/jvp()/reduce_sum")
      'loss'
      >>> layer_name("jit(run)/while/body/closed_call/add")
      'other'
    """
    scopes, is_differentiated = op_name, "jvp(" in op_name
    # A program's own function is no layer, nor are jax's functions such as `jit(relu)`.
    scopes = re.sub(r"\b(?:jit|pjit)\([^()]*\)", "", scopes)
    while (stripped := _WRAPPERS.sub(r"\1", scopes)) != scopes:
        scopes = stripped
    # The last part is the operation.
    parts = [part for part in scopes.split("/")[:-1] if not _PARTS_OF_CONTROL_FLOW.fullmatch(part)]
    if parts:
        return "/".join(parts)
    return "loss" if is_differentiated else "other"


def product_flops(jaxpr: Any) -> int:
    """Returns the operations of all products and convolutions of a program, on all devices."""
    total = 0
    for eqn, _, executions in walk_equations(jaxpr):
        shapes = [tuple(aval.shape) for aval in avals(eqn)]
        if eqn.primitive is primitives.dot_general_p:
            (contracted, _), _ = eqn.params["dimension_numbers"]
            terms = math.prod(shapes[0][axis] for axis in contracted)
        elif eqn.primitive is primitives.conv_general_dilated_p:
            # Every output is a sum over the kernel, without its axis of output features.
            features = eqn.params["dimension_numbers"].rhs_spec[0]
            terms = math.prod(shapes[1]) // shapes[1][features]
        elif eqn.primitive.name in _PRODUCTS_OF_ATTENTION:
            # The query is [B, T, N, H], or [B, N, T, H] in the second layout; so is the key.
            keys = shapes[1][2 if eqn.params["layout"] else 1]
            terms = _PRODUCTS_OF_ATTENTION[eqn.primitive.name] * keys
            shapes = shapes[:1]
        else:
            continue
        total += 2 * executions * terms * math.prod(shapes[-1])
    return total


def trace_step(step: Any, state: PyTree, batch: PyTree) -> Any:
    """Returns the jaxpr of a step, for the devices of its state."""
    with tracing_guards(), compiling_for(platform_of(state)):
        # A new function: jax would reuse a trace of the step that was made without the guards.
        return jax.make_jaxpr(lambda *args: step(*args))(state, batch)


def _roofline(chip: Chip, flops: float, moved: float, kernels: float) -> tuple[float, str]:
    """Returns the time that a step takes by speed and bandwidth, and how it was found."""
    if not chip.peak_flops or not chip.bandwidth:
        return math.nan, "nothing: the speed of the device is unknown"
    seconds = max(flops / chip.peak_flops, moved / chip.bandwidth)
    return seconds + kernels * KERNEL_SECONDS, "a roofline, and 2 µs for each kernel"


def _format_time(seconds: float) -> str:
    """Returns a time in a unit that suits it, "unknown" for NaN.

    Examples:
      >>> _format_time(2.5e-5), _format_time(0.0125), _format_time(3)
      ('25.0 µs', '12.5 ms', '3.0 s')
    """
    if math.isnan(seconds):
        return "unknown"
    for unit, size in (("s", 1.0), ("ms", 1e-3)):
        if seconds >= size:
            return f"{seconds / size:.1f} {unit}"
    return f"{seconds * 1e6:.1f} µs"
