"""Checks that the processes of a run have the same data, arguments and programs."""

import re
import zlib
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding

from functrain.common import _tree
from functrain.common._checks import require_no_problems
from functrain.common._gather import gather_from_processes
from functrain.common._types import PyTree
from functrain.data._batches import Batches


def has_remote_shards(x: Any) -> bool:
    """Returns True for an array of which other processes hold a part."""
    return isinstance(x, jax.Array) and not x.is_fully_addressable


def require_same_batches(batches: PyTree) -> None:
    """Raises ValueError unless all processes have the same batches, by a digest of their bytes."""
    digest = 0
    for path, x in _tree.leaves_with_path(batches):
        digest = zlib.crc32(f"{path} {_tree.strong_spec(x)}".encode(), digest)
        # An array that is divided over the processes already is one array, not a copy in each.
        if not has_remote_shards(x):
            digest = zlib.crc32(np.ascontiguousarray(x).reshape(-1).view(np.uint8).data, digest)
    _require_same(
        "data",
        {"digest of the first chunk": str(digest)},
        "the same batches in every process, of which each device takes its shard",
        "Give every process all of the data in the same order. If each process has a part of the "
        "data, use functrain.distributed.local.",
    )


def require_same_program(program: Any, args: tuple[PyTree, ...]) -> None:
    """Raises ValueError in every process unless all of them are about to run the same program.

    Otherwise they would wait for each other's collectives forever.
    """
    # The text holds the addresses of host callbacks, which differ in each process.
    text = _strip_addresses(program.lower(*args).as_text())
    _require_same(
        "step",
        {"digest of the program": str(zlib.crc32(text.encode()))},
        "the same program in every process",
        "Run the same code, with the same versions and arguments, in every process; use a hook "
        "for what only one process does.",
    )


def require_same_run(batches: Batches, sharding: NamedSharding, **arguments: Any) -> None:
    """Raises ValueError in every process unless all have the same data, sharding and arguments.

    It runs before the first program, and names what differs.
    """
    if sharding.is_fully_addressable:
        return
    facts = {
        **batches.fingerprint(),
        "sharding": f"{sharding.spec} over {dict(sharding.mesh.shape)}",
        **{name: _strip_addresses(repr(value)) for name, value in arguments.items()},
    }
    _require_same(
        batches.name,
        facts,
        "the same in every process",
        "Nothing was run. Give every process the same data and arguments. With "
        "functrain.distributed.local, where each process has a part of the data, give each the "
        "same number of batches.",
    )


def _require_same(name: str, facts: dict[str, str], expected: str, advice: str) -> None:
    """Raises ValueError in every process unless all of them pass the same facts."""
    first, *others = gather_from_processes(facts)
    lines = []
    for fact, value in first.items():
        for i, other in enumerate(others, 1):
            got = other.get(fact, "nothing")
            if got != value:
                lines.append(f"{fact}: {value} in process 0, {got} in process {i}")
    require_no_problems(name, lines, expected, advice)


def _strip_addresses(text: str) -> str:
    return re.sub(r"0x[0-9a-f]+", "", text)
