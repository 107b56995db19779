"""What a fit will need of memory, from its compiled program, before anything runs."""

import collections
import dataclasses
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from functrain import rewrites as _rewrites
from functrain.common import _repr, _tree
from functrain.common._checks import is_number, is_whole, require_flags
from functrain.common._types import PyTree, Step
from functrain.data._batch import require_batch
from functrain.engine import _placement
from functrain.engine._driver import RUN_AHEAD, SPARE_BYTES
from functrain.engine._plan import auto_steps, bytes_on_each, nbytes
from functrain.engine._programs import TRAINING, Loop, known_length, program
from functrain.engine._sheet import sheet
from functrain.metrics._metric import Metered
from functrain.rewrites import Mode
from functrain.step._check import check_step
from functrain.step._metered import MeteredStep

# Chunks at once: those of the programs under way, and the one that is made meanwhile.
CHUNKS = RUN_AHEAD + 1


@dataclasses.dataclass(frozen=True)
class Memory:
    """What a fit needs, in bytes; what `memory` returns. Prints as a table.

    Attributes:
      k: Steps per program.
      leaves: Of each leaf of the state by its path, the largest first; with metrics theirs, too.
      parts: The same by the parts of the state: params, opt_state, model_state, the rest.
      given: The state as it was given, which a fit copies; 0 with ``donate=True``.
      spare: The copy to go back to if a program fails; 0 for states above 256 MiB.
      chunks: Of K batches each, as many as there are at once, at the most.
      rows: What the programs under way report.
      temporaries: What the program needs besides: activations, gradients.
      saved: The copy that a checkpointer writes while training goes on; 0 without one, and off CPU,
        where it lies in the memory of the host.

    Examples:
      >>> found = Memory(8, {"w": 4000}, {"w": 4000}, 4000, 4000, 300, 96, 8000)
      >>> found, found.state, found.total
      (Memory(19.9 KiB: state=3.9 KiB, k=8, chunks=300 B, temporaries=7.8 KiB), 4000, 20396)
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
        """All leaves, once."""
        return sum(self.leaves.values())

    @property
    def total(self) -> int:
        """All of it."""
        copies = self.state + self.given + self.spare + self.saved
        return copies + self.chunks + self.rows + self.temporaries

    def __repr__(self) -> str:
        total, state, chunks, temporaries = map(
            _repr.size, (self.total, self.state, self.chunks, self.temporaries)
        )
        of = f"state={state}, k={self.k}, chunks={chunks}, temporaries={temporaries}"
        return f"Memory({total}: {of})"

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
        rows = ([(name, _repr.size(size)) for name, size in part.items()] for part in sections)
        return sheet(["what a fit needs"], ["bytes"], rows)


def memory(
    step: Step[Any],
    state: PyTree,
    batch: PyTree,
    *,
    k: int | None = None,
    sharding: _placement.ShardingArg = None,
    donate: bool = False,
    checkpointer: Any = None,
    rewrites: Mode = "auto",
) -> Memory:
    """Says what a fit will need of memory, from the program it would run.

    The program is compiled, with shapes alone: nothing is computed or allocated. What is counted is
    what lies on each device at the most. Not counted are evaluations, hooks, the code, the
    compiler, and what the data take that are not batches yet.

    Args:
      step: ``(state, batch) -> (state, logs)``, with metrics or without.
      state: The state, or its shapes (`jax.eval_shape`, `jax.ShapeDtypeStruct`); what says its
        sharding counts as much as lies on each device.
      batch: One batch of full size, or its shapes.
      k: Steps per program; None for what ``fuse="auto"`` takes where no epoch is shorter.
      sharding: Of one batch, as in `fit`.
      donate: Whether `fit` takes the state over instead of copying it.
      checkpointer: The one that `fit` gets: on CPU it takes the state once more.
      rewrites: As in `fit`.

    Returns:
      A `Memory`: print it for a table; its numbers are bytes.

    Raises:
      ValueError: `k` is below 1, or the devices do not divide the batch.
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
      >>> found = memory(train_step(loss_fn, tx), state, batch)
      >>> found.k, found.parts["params"] == 4 * 4096**2, found.state == 12 * 4096**2 + 8
      (8, True, True)
    """
    check_step(step)
    require_flags(donate=donate)
    require_batch(batch)
    if k is not None and not is_whole(k, 1):
        raise ValueError(f"k: expected a whole number of steps, at least 1, or None, got {k!r}")
    for path, x in _tree.leaves_with_path(batch):
        if not _tree.is_array(x) or not x.shape:
            raise TypeError(
                f"batch: expected arrays [B, ...] or their shapes, got {_tree.spec(x)} at {path}. "
                "It is memory(step, state, batch)."
            )
    k = k or auto_steps(nbytes(batch), nbytes(state))
    where = _placement.batch_sharding(sharding)
    carry, chunk = _carry(step, state, where), _placement.chunk_shapes(batch, k, where)
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


def _carry(step: Any, state: PyTree, where: NamedSharding | None) -> PyTree:
    """Returns what a fit would carry, without values: the state, and metrics beside it."""
    everywhere = None if where is None else NamedSharding(where.mesh, PartitionSpec())

    def placed(path: tuple[Any, ...], x: Any) -> jax.ShapeDtypeStruct:
        if not (_tree.is_array(x) or is_number(x)):
            raise TypeError(
                f"state: expected an array or its shape at {_tree.path_str(path)}, got "
                f"{_tree.spec(x)}."
            )
        shape, own = jax.eval_shape(_tree.copy, x), getattr(x, "sharding", None)
        lies = own if isinstance(own, NamedSharding) else everywhere
        return jax.ShapeDtypeStruct(shape.shape, shape.dtype, sharding=lies)

    found = jax.tree_util.tree_map_with_path(placed, state)
    if not isinstance(step, MeteredStep) or isinstance(state, Metered):
        return found
    return Metered(found, jax.eval_shape(lambda: step.start(()).metrics))


def _of_program(step: Any, carry: PyTree, chunk: PyTree, k: int, rewrites: Mode) -> tuple[int, int]:
    """Compiles what a fit would run; returns the bytes of its rows, and what it needs besides."""
    chosen, found = _rewrites.mode(rewrites), _placement.pins(carry)
    run: Any = program(step, TRAINING, Loop(k, chosen, whole=known_length(), pins=found))
    lowered = run.lower(carry, chunk, np.int32(k))
    stats, rows = lowered.compile().memory_analysis(), nbytes(lowered.out_info[1])
    # Results that could not take the place of an argument are in the way, too.
    results = stats.output_size_in_bytes - stats.alias_size_in_bytes - rows
    return rows, int(stats.temp_size_in_bytes + max(0, results))


def _leaves(carry: PyTree) -> dict[str, int]:
    """Returns the bytes of each leaf by its path, the largest first."""
    metered = isinstance(carry, Metered)
    parts = (carry.state, {"metrics": carry.metrics}) if metered else (carry,)
    leaves = (leaf for part in parts for leaf in _tree.leaves_with_path(part))
    return dict(collections.Counter({path: bytes_on_each(x) for path, x in leaves}).most_common())


def _parts(leaves: Mapping[str, int]) -> dict[str, int]:
    """Sums leaves up by the part of the state that they are in."""
    found: collections.Counter[str] = collections.Counter()
    is_train_state = any(path.startswith("params") for path in leaves)
    for path, size in leaves.items():
        name = path.partition("/")[0]
        if is_train_state and name not in ("params", "opt_state", "model_state"):
            name = "the rest"
        found[name] += size
    return dict(found.most_common())
