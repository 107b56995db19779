"""The memory that a fit needs, from its compiled program, before anything runs."""

import collections
import dataclasses
import itertools
from collections.abc import Callable, Mapping
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from functrain import rewrites as _rewrites
from functrain.common import _repr, _tree
from functrain.common._checks import is_number, require, require_flags, require_integer
from functrain.common._types import PyTree, Step
from functrain.data._batch import require_batch
from functrain.engine import _placement
from functrain.engine._driver import RUN_AHEAD, SPARE_BYTES
from functrain.engine._plan import auto_steps, nbytes
from functrain.engine._programs import TRAINING, LoopOptions, prefers_static_length, program
from functrain.inspect._leaf import bytes_on_each
from functrain.inspect._sheet import sheet
from functrain.metrics._metric import Metered
from functrain.rewrites import Mode
from functrain.step._check import check_step
from functrain.step._metered import MeteredStep

# Chunks that exist at once: those of the programs under way, and the one that is made meanwhile.
CHUNKS = RUN_AHEAD + 1


@dataclasses.dataclass(frozen=True)
class Memory:
    """The bytes that a fit needs, as `memory` returns them. Prints as a table.

    Attributes:
      k: Steps per program.
      leaves: Bytes of each leaf of the state and of its metrics by path, the largest first.
      parts: The same by the parts of the state: params, opt_state, model_state, the rest.
      given: The state as it was given, which a fit copies; 0 with ``donate=True``.
      spare: The copy to go back to if a program fails; 0 for states above 256 MiB.
      chunks: Of K batches each, as many as there are at once, at the most.
      rows: Logs of the programs under way.
      temporaries: Memory that the program needs besides: activations, gradients.
      saved: The copy that a checkpointer writes while training goes on; 0 without one, and off CPU,
        where it lies in the memory of the host.

    Examples:
      >>> found = Memory(8, {"w": 4000}, {"w": 4000}, 4000, 4000, 300, 96, 8000)
      >>> found, found.state, found.total
      (Memory(19.9 KiB: state=3.9 KiB, k=8), 4000, 20396)
    """

    k: int
    leaves: Mapping[str, int]
    parts: Mapping[str, int]
    given: int
    spare: int
    chunks: int
    rows: int
    temporaries: int
    saved: int = 0

    @property
    def state(self) -> int:
        """The bytes of all leaves, once."""
        return sum(self.leaves.values())

    @property
    def total(self) -> int:
        """The sum of all parts and copies."""
        copies = self.state + self.given + self.spare + self.saved
        return copies + self.chunks + self.rows + self.temporaries

    def __repr__(self) -> str:
        total, state = map(_repr.format_bytes, (self.total, self.state))
        return f"Memory({total}: state={state}, k={self.k})"

    def __str__(self) -> str:
        """Returns the table, never cut to the width of a terminal."""
        sections: tuple[Mapping[str, int], ...] = (
            self.leaves,
            {f"all of {name}": size for name, size in self.parts.items()},
            {
                "the state": self.state,
                "the state as it was given": self.given,
                "a copy to go back to": self.spare,
                "a copy that is being saved": self.saved,
                f"{CHUNKS} chunks of {self.k} batches": self.chunks,
                "logs": self.rows,
                "temporaries of the program": self.temporaries,
            },
            {"together": self.total},
        )
        rows = (
            [(name, _repr.format_bytes(size)) for name, size in part.items()] for part in sections
        )
        return sheet(["what a fit needs", "bytes"], *rows, numbers=["bytes"])


def memory(
    state: PyTree,
    step: Step[Any],
    batch: PyTree,
    *,
    fuse: int | None = None,
    sharding: _placement.ShardingArg = None,
    donate: bool = False,
    checkpointer: Any = None,
    rewrites: Mode = "auto",
) -> Memory:
    """Returns the memory that a fit needs, from the program that it would run.

    The program is compiled with shapes alone: nothing is computed or allocated. The numbers are the
    most that lies on each device. Evaluations, hooks, the code, the compiler, and data that are not
    in batches yet are not counted.

    Args:
      state: The state, or its shapes (`jax.eval_shape`, `jax.ShapeDtypeStruct`). Of a leaf with a
        sharding, the part on one device counts.
      step: ``(state, batch) -> (state, logs)``, with metrics or without.
      batch: One batch of full size, or its shapes.
      fuse: Steps per program; None for what ``fuse="auto"`` takes where no epoch is shorter.
      sharding: The sharding of one batch, as in `fit`.
      donate: Whether `fit` takes the state over instead of copying it.
      checkpointer: The one that `fit` gets: on CPU it takes the state once more.
      rewrites: As in `fit`.

    Returns:
      A `Memory`: print it for a table; its numbers are bytes.

    Raises:
      ValueError: `fuse` is below 1, or the devices do not divide the batch.
      TypeError: `step` is no step, or a leaf is no array, or one of the batch has no axis.

    Examples:
      >>> import jax, jax.numpy as jnp, optax
      >>> from functrain import Aux, TrainState, train_step
      >>> def loss_fn(params, model_state, batch, *, rng, training):
      ...     return jnp.mean((batch @ params["w"]) ** 2), Aux(model_state)
      >>> tx = optax.adam(1e-3)
      >>> def create():
      ...     return TrainState.create(params={"w": jnp.ones((4096, 4096))}, tx=tx)
      >>> state = jax.eval_shape(create)
      >>> batch = jax.ShapeDtypeStruct((32, 4096), jnp.float32)
      >>> found = memory(state, train_step(loss_fn, tx), batch)
      >>> found.k, found.parts["params"] == 4 * 4096**2, found.state == 12 * 4096**2 + 8
      (8, True, True)
    """
    check_step(step)
    require_flags(donate=donate)
    require_batch(batch)
    if fuse is not None:
        require_integer("fuse", fuse)
    _require_leaves("state", state, lambda x: _tree.is_array(x) or is_number(x), "an array")
    _require_leaves("batch", batch, lambda x: _tree.is_array(x) and x.shape, "an array [B, ...]")
    k = fuse or auto_steps(nbytes(batch), nbytes(state))
    target = _placement.batch_sharding(sharding)
    carry, chunk = _carry(step, state, target), _placement.chunk_shapes(batch, k, target)
    rows, temporaries = _of_program(step, carry, chunk, k, rewrites)
    leaves = _leaves(carry)
    once = sum(leaves.values())
    return Memory(
        k=k,
        leaves=leaves,
        parts=_parts(leaves),
        given=0 if donate else once,
        spare=once if nbytes(carry) <= SPARE_BYTES else 0,
        chunks=CHUNKS * bytes_on_each(chunk),
        rows=CHUNKS * rows,
        temporaries=temporaries,
        saved=once if checkpointer is not None and jax.default_backend() == "cpu" else 0,
    )


def _require_leaves(name: str, tree: PyTree, fits: Callable[[Any], Any], expected: str) -> None:
    for path, x in _tree.leaves_with_path(tree):
        advice = f"It is at {path}, and the order is memory(state, step, batch)."
        require(fits(x), name, f"{expected} or its shape", x, advice, error=TypeError)


def _carry(step: Any, state: PyTree, target: NamedSharding | None) -> PyTree:
    """Returns the shapes that a fit carries: those of the state, and of metrics beside it."""
    everywhere = None if target is None else NamedSharding(target.mesh, PartitionSpec())

    def placed(x: Any, shape: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
        sharding = getattr(x, "sharding", None)
        sharding = sharding if isinstance(sharding, NamedSharding) else everywhere
        return jax.ShapeDtypeStruct(shape.shape, shape.dtype, sharding=sharding)

    carry = jax.tree.map(placed, state, jax.eval_shape(_tree.copy, state))
    if not isinstance(step, MeteredStep) or isinstance(state, Metered):
        return carry
    return Metered(carry, jax.eval_shape(step.start, carry).metrics)


def _of_program(step: Any, carry: PyTree, chunk: PyTree, k: int, rewrites: Mode) -> tuple[int, int]:
    """Compiles the program of a fit; returns the bytes of its rows, and those it needs besides."""
    pins = _placement.read_pins(carry)
    loop = LoopOptions(k, _rewrites.mode(rewrites), takes_all=prefers_static_length(), pins=pins)
    run: Any = program(step, TRAINING, loop)
    lowered = run.lower(carry, chunk, np.int32(k))
    stats, rows = lowered.compile().memory_analysis(), nbytes(lowered.out_info[1])
    # Results that could not take the place of an argument need memory, too.
    results = stats.output_size_in_bytes - stats.alias_size_in_bytes - rows
    return rows, int(stats.temp_size_in_bytes + max(0, results))


def _leaves(carry: PyTree) -> dict[str, int]:
    """Returns the bytes of each leaf by its path, the largest first."""
    is_metered = isinstance(carry, Metered)
    parts = (carry.state, {"metrics": carry.metrics}) if is_metered else (carry,)
    leaves = itertools.chain.from_iterable(map(_tree.leaves_with_path, parts))
    return dict(collections.Counter({path: bytes_on_each(x) for path, x in leaves}).most_common())


def _parts(leaves: Mapping[str, int]) -> dict[str, int]:
    """Returns the bytes of each part of the state, the largest first."""
    bytes_of_part: collections.Counter[str] = collections.Counter()
    is_train_state = any(path.startswith("params") for path in leaves)
    for path, size in leaves.items():
        name = path.partition("/")[0]
        is_part = not is_train_state or name in ("params", "opt_state", "model_state")
        bytes_of_part[name if is_part else "the rest"] += size
    return dict(bytes_of_part.most_common())
