"""The collectives of a compiled program: how often they run, and the bytes they move."""

from typing import Any, NamedTuple

from functrain.common._hlo import COLLECTIVES, instructions


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
    traffic: dict[str, Traffic] = {}
    for instruction, times in instructions(text):
        # An asynchronous collective is a pair of instructions, `-start` and `-done`. Only the
        # second one counts, whose result is that of the collective.
        kind = instruction.opcode.removesuffix("-done")
        if kind in COLLECTIVES:
            calls, total = traffic.get(kind, (0, 0))
            traffic[kind] = Traffic(calls + times, total + times * instruction.bytes)
    return traffic
