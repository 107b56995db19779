"""The collectives of a compiled program: how often they run, and the bytes they move."""

import math
import re
from typing import Any, NamedTuple

# Patterns over the text of a compiled program (HLO). An asynchronous collective is a pair of
# instructions, `-start` and `-done`: only `-done` counts, whose result is that of the collective.
_KINDS = "all-gather|all-reduce|reduce-scatter|all-to-all|collective-permute"
_COMPUTATION = re.compile(r"^(ENTRY )?%?([\w.-]+) [^\n]*\{\n(.*?)^\}", re.MULTILINE | re.DOTALL)
_COLLECTIVE = re.compile(rf" = (.*?) ({_KINDS})(-done)?\(")
_CALLED = re.compile(
    r"(?:body|calls|to_apply|condition|true_computation|false_computation)=%?([\w.-]+)"
)
_BRANCHES = re.compile(r"branch_computations=\{([^}]*)\}")
_TRIP_COUNT = re.compile(r'known_trip_count":?=?\{"n":"?(\d+)')
# The digits in the name of a dtype are its bits: f32, bf16, f8e4m3fn. `pred` has none.
_SHAPE = re.compile(r"([a-z]+)(\d+)?\w*\[([\d,]*)\]")


class Traffic(NamedTuple):
    """The data that one kind of collective moves in a program.

    Attributes:
      calls: How often the collective runs.
      bytes: Bytes of all its results on each device.

    Examples:
      >>> Traffic(2, 2048).bytes
      2048
    """

    calls: int
    bytes: int


def collectives(program: Any) -> dict[str, Traffic]:
    """Returns the traffic between devices in a compiled program, by kind of collective.

    Args:
      program: The result of ``jax.jit(f).lower(...).compile()``, or its text.

    Returns:
      The traffic of those of ``"all-gather"``, ``"all-reduce"``, ``"reduce-scatter"``,
      ``"all-to-all"`` and ``"collective-permute"`` that the program contains. A collective in a
      loop counts as often as the loop runs, if the compiler knows the number of rounds, else once.
      In a program of `functrain.fuse` the result is then the traffic of one step.

    Examples:
      >>> import jax, jax.numpy as jnp
      >>> from jax.sharding import NamedSharding, PartitionSpec as P
      >>> mesh = jax.make_mesh((jax.device_count(),), ("data",))
      >>> x = jax.device_put(jnp.ones((64, 8)), NamedSharding(mesh, P("data")))
      >>> traffic = collectives(jax.jit(jnp.sum).lower(x).compile())
      >>> jax.device_count() == 1 or traffic["all-reduce"].bytes == 4
      True
    """
    text = program if isinstance(program, str) else program.as_text()
    computations = _COMPUTATION.findall(text)
    bodies = {name: body.splitlines() for _, name, body in computations}
    traffic: dict[str, Traffic] = {}

    def add_computation(name: str, calls: int) -> None:
        for line in bodies.get(name, ()):
            collective = _COLLECTIVE.search(line)
            if collective is not None:
                shapes, kind, _ = collective.groups()
                count, total = traffic.get(kind, (0, 0))
                traffic[kind] = Traffic(count + calls, total + calls * _count_bytes(shapes))
            # A loop of unknown length has no trip count.
            trip_count = _TRIP_COUNT.search(line)
            rounds = int(trip_count[1]) if trip_count else 1
            for called in _called_computations(line):
                add_computation(called, calls * rounds)

    # Each call counts, so the walk begins at the entry and follows the calls.
    for is_entry, name, _ in computations:
        if is_entry:
            add_computation(name, 1)
    return traffic


def _called_computations(line: str) -> list[str]:
    """Returns the names of the computations that an instruction runs."""
    # The computation that an all-reduce calls is its sum, which moves nothing.
    if _COLLECTIVE.search(line):
        return []
    branches = _BRANCHES.search(line)
    names = branches[1].replace("%", "").split(", ") if branches else []
    return [*_CALLED.findall(line), *names]


def _count_bytes(shapes: str) -> int:
    """Returns the bytes of a shape such as ``f32[8,3]{1,0}``, or of several in brackets."""
    total = 0
    for kind, bits, axes in _SHAPE.findall(shapes):
        itemsize = 1 if kind == "pred" else max(1, int(bits or 0) // 8)
        # A scalar, f32[], has no axes, and the product of none is 1.
        total += itemsize * math.prod(map(int, filter(None, axes.split(","))))
    return total
