"""What a compiled program sends from device to device: how often, and how much."""

import math
import re
from typing import Any, NamedTuple

_KINDS = "all-gather|all-reduce|reduce-scatter|all-to-all|collective-permute"
_COMPUTATION = re.compile(r"^(ENTRY )?%?([\w.-]+) .*\{$")
_COLLECTIVE = re.compile(rf" = (.*?) ({_KINDS})(-done)?\(")
_CALLED = re.compile(
    r"(?:body|calls|to_apply|condition|true_computation|false_computation)=%?([\w.-]+)"
)
_BRANCHES = re.compile(r"branch_computations=\{([^}]*)\}")
_TRIPS = re.compile(r'known_trip_count":?=?\{"n":"?(\d+)')
_SHAPE = re.compile(r"([a-z]+)(\d+)?\w*\[([\d,]*)\]")


class Moved(NamedTuple):
    """What one kind of collective moves in a program.

    Attributes:
      times: How often it runs.
      bytes: What comes out of it on each device, in all.

    Examples:
      >>> Moved(2, 2048).bytes
      2048
    """

    times: int
    bytes: int


def collectives(program: Any) -> dict[str, Moved]:
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
    parts, entry = _parts(text)
    found: dict[str, Moved] = {}

    def add(name: str, times: int) -> None:
        for line in parts.get(name, ()):
            if collective := _COLLECTIVE.search(line):
                kind, size = collective[2], _bytes(collective[1])
                count, total = found.get(kind, (0, 0))
                found[kind] = Moved(count + times, total + times * size)
            trips = _TRIPS.search(line)
            for called in _called(line):
                add(called, times * (int(trips[1]) if trips else 1))

    add(entry, 1)
    return found


def _parts(text: str) -> tuple[dict[str, list[str]], str]:
    """Returns the lines of each computation by its name, and the name of the first to run."""
    parts: dict[str, list[str]] = {}
    name = entry = ""
    for line in text.splitlines():
        if begin := _COMPUTATION.match(line):
            name = begin[2]
            parts[name] = []
            entry = name if begin[1] else entry
        elif name:
            parts[name].append(line)
    return parts, entry


def _called(line: str) -> list[str]:
    if _COLLECTIVE.search(line):  # its sum, say, is no program
        return []
    branches = _BRANCHES.search(line)
    named = branches[1].replace("%", "").split(", ") if branches else []
    return [*_CALLED.findall(line), *named]


def _bytes(shapes: str) -> int:
    """Returns the bytes of a shape such as ``f32[8,3]{1,0}``, or of several in brackets."""
    total = 0
    for kind, bits, dims in _SHAPE.findall(shapes):
        size = 1 if kind == "pred" else max(1, int(bits or 0) // 8)
        total += size * math.prod(int(n) for n in dims.split(",") if n)
    return total
