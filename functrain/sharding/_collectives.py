"""The collectives of a compiled program: how often they run, and how many bytes they move."""

import math
import re
from typing import Any, NamedTuple

_KINDS = "all-gather|all-reduce|reduce-scatter|all-to-all|collective-permute"
_COMPUTATION = re.compile(r"^(ENTRY )?%?([\w.-]+) [^\n]*\{\n(.*?)^\}", re.MULTILINE | re.DOTALL)
_COLLECTIVE = re.compile(rf" = (.*?) ({_KINDS})(-done)?\(")
_CALLED = re.compile(
    r"(?:body|calls|to_apply|condition|true_computation|false_computation)=%?([\w.-]+)"
)
_BRANCHES = re.compile(r"branch_computations=\{([^}]*)\}")
_TRIPS = re.compile(r'known_trip_count":?=?\{"n":"?(\d+)')
_SHAPE = re.compile(r"([a-z]+)(\d+)?\w*\[([\d,]*)\]")


class Traffic(NamedTuple):
    """The data that one kind of collective moves in a program.

    Attributes:
      times: How often it runs.
      bytes: What comes out of it on each device, in all.

    Examples:
      >>> Traffic(2, 2048).bytes
      2048
    """

    times: int
    bytes: int


def collectives(program: Any) -> dict[str, Traffic]:
    """Returns what a compiled program sends from device to device, by kind.

    Args:
      program: What ``jax.jit(f).lower(...).compile()`` returns, or its text.

    Returns:
      By ``"all-gather"``, ``"all-reduce"``, ``"reduce-scatter"``, ``"all-to-all"`` and
      ``"collective-permute"``, those that are there. What is within a loop counts as often as
      the loop runs, as far as the compiler knows that; else once, as the body of `functrain.fuse`
      does: what is found then is that of one step.

    Examples:
      >>> import jax, jax.numpy as jnp
      >>> from jax.sharding import NamedSharding, PartitionSpec as P
      >>> mesh = jax.make_mesh((jax.device_count(),), ("data",))
      >>> x = jax.device_put(jnp.ones((64, 8)), NamedSharding(mesh, P("data")))
      >>> found = collectives(jax.jit(jnp.sum).lower(x).compile())
      >>> jax.device_count() == 1 or found["all-reduce"].bytes == 4
      True
    """
    text = program if isinstance(program, str) else program.as_text()
    computations = _COMPUTATION.findall(text)
    bodies = {name: body.splitlines() for _, name, body in computations}
    moved: dict[str, Traffic] = {}

    def add(name: str, times: int) -> None:
        for line in bodies.get(name, ()):
            if collective := _COLLECTIVE.search(line):
                shapes, kind, _ = collective.groups()
                count, total = moved.get(kind, (0, 0))
                moved[kind] = Traffic(count + times, total + times * _bytes(shapes))
            trips = _TRIPS.search(line)
            for called in _called(line):
                add(called, times * (int(trips[1]) if trips else 1))

    for is_entry, name, _ in computations:
        if is_entry:
            add(name, 1)
    return moved


def _called(line: str) -> list[str]:
    """Returns the names of the computations that an instruction runs."""
    if _COLLECTIVE.search(line):  # the sum of an all-reduce counts as a part of it
        return []
    branches = _BRANCHES.search(line)
    names = branches[1].replace("%", "").split(", ") if branches else []
    return [*_CALLED.findall(line), *names]


def _bytes(shapes: str) -> int:
    """Returns the bytes of a shape such as ``f32[8,3]{1,0}``, or of several in brackets."""
    total = 0
    for kind, bits, dims in _SHAPE.findall(shapes):
        size = 1 if kind == "pred" else max(1, int(bits or 0) // 8)
        total += size * math.prod(int(n) for n in dims.split(",") if n)
    return total
