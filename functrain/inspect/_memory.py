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
from functrain.common._platform import platform_of
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

# Chunks that exist at once: one for each program in flight, and the one being assembled meanwhile.
CHUNKS = RUN_AHEAD + 1


@dataclasses.dataclass(frozen=True)
class Memory:
    """The memory that a fit needs on each device, in bytes, from `memory`. Prints as a table.

    Attributes:
      k: Steps per program.
      leaves: Each leaf of the state and of its metrics by path, the largest first.
      parts: Each part of the state: params, opt_state, model_state, other.
      original_state: The caller's state, which a fit copies; 0 with ``donate=True``.
      recovery_copy: The copy that a fit returns if a program fails; 0 for states above 256 MiB.
      chunks: The chunks of K batches that are in memory at once, at most.
      logs: The logs of the programs in flight.
      temporaries: Other memory of the program: activations, gradients.
      checkpoint_copy: The copy that a checkpointer writes while training continues. 0 without a
        checkpointer, and on accelerators, whose copy is in the memory of the host.

    Examples:
      >>> needed = Memory(8, {"w": 4000}, {"w": 4000}, 4000, 4000, 300, 96, 8000)
      >>> needed, needed.state, needed.total
      (Memory(19.9 KiB: state=3.9 KiB, k=8), 4000, 20396)
    """

    k: int
    leaves: Mapping[str, int]
    parts: Mapping[str, int]
    original_state: int
    recovery_copy: int
    chunks: int
    logs: int
    temporaries: int
    checkpoint_copy: int = 0

    @property
    def state(self) -> int:
        """The bytes of one copy of the state, with its metrics."""
        return sum(self.leaves.values())

    @property
    def total(self) -> int:
        """The bytes of all copies of the state, and of everything else."""
        copies = self.state + self.original_state + self.recovery_copy + self.checkpoint_copy
        return copies + self.chunks + self.logs + self.temporaries

    def __repr__(self) -> str:
        total, state = map(_repr.format_bytes, (self.total, self.state))
        return f"Memory({total}: state={state}, k={self.k})"

    def __str__(self) -> str:
        """Returns the table, never cut to the width of a terminal."""
        sections: tuple[Mapping[str, int], ...] = (
            self.leaves,
            {f"{name} (total)": size for name, size in self.parts.items()},
            {
                "state": self.state,
                "your original state": self.original_state,
                "recovery copy": self.recovery_copy,
                "checkpoint copy": self.checkpoint_copy,
                f"{CHUNKS} chunks of {self.k} batches": self.chunks,
                "logs": self.logs,
                "program temporaries": self.temporaries,
            },
            {"total": self.total},
        )
        columns = ["memory of a fit", "bytes"]
        return sheet(columns, *map(_format_rows, sections), numbers=["bytes"])


def _format_rows(section: Mapping[str, int]) -> list[tuple[str, str]]:
    return [(name, _repr.format_bytes(size)) for name, size in section.items()]


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

    The program is compiled for shapes only: nothing is computed or allocated. The numbers are upper
    bounds for each device. Not counted are evaluations, hooks, the compiled code, the compiler, and
    data that is not yet in batches.

    Args:
      state: The state, or its shapes (`jax.eval_shape`, `jax.ShapeDtypeStruct`). For a leaf with a
        sharding, the shard on one device counts.
      step: ``(state, batch) -> (state, logs)``, with metrics or without.
      batch: One batch of full size, or its shapes.
      fuse: Steps per program; None for the number that ``fuse="auto"`` chooses if no epoch is
        shorter.
      sharding: The sharding of one batch, as in `fit`.
      donate: True if `fit` is called with ``donate=True``, and does not copy the state.
      checkpointer: The checkpointer of the fit: on CPU it needs one more copy of the state.
      rewrites: As in `fit`.

    Returns:
      A `Memory` with numbers of bytes; print it for a table.

    Raises:
      ValueError: `fuse` is below 1, or the batch does not divide over the devices.
      TypeError: `step` is not a step, a leaf is not an array, or a leaf of the batch has no axes.

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
      >>> needed = memory(state, train_step(loss_fn, tx), batch)
      >>> needed.k, needed.parts["params"] == 4 * 4096**2, needed.state == 12 * 4096**2 + 8
      (8, True, True)
    """
    check_step(step)
    require_flags(donate=donate)
    require_batch(batch)
    if fuse is not None:
        require_integer("fuse", fuse)
    _require_leaves("state", state, lambda x: _tree.is_array(x) or is_number(x), "an array")
    _require_leaves("batch", batch, lambda x: _tree.is_array(x) and x.shape, "an array [B, ...]")
    # The rule by which a fit chooses K.
    k = fuse or auto_steps(nbytes(batch), nbytes(state))
    target = _placement.batch_sharding(sharding)
    carry, chunk = _carry(step, state, target), _placement.chunk_shapes(batch, k, target)
    logs, temporaries = _analyze_program(step, carry, chunk, k, rewrites)
    leaves = _bytes_by_path(carry)
    state_bytes = sum(leaves.values())
    # On accelerators the copy is fetched to the host before it is written.
    copies_for_checkpoint = checkpointer is not None and platform_of(carry) == "cpu"
    return Memory(
        k=k,
        leaves=leaves,
        parts=_bytes_by_part(leaves),
        # A donated state is reused for the results.
        original_state=0 if donate else state_bytes,
        recovery_copy=state_bytes if nbytes(carry) <= SPARE_BYTES else 0,
        chunks=CHUNKS * bytes_on_each(chunk),
        logs=CHUNKS * logs,
        temporaries=temporaries,
        checkpoint_copy=state_bytes if copies_for_checkpoint else 0,
    )


def _require_leaves(name: str, tree: PyTree, is_valid: Callable[[Any], Any], expected: str) -> None:
    """Raises TypeError if a leaf of the argument is not valid."""
    for path, x in _tree.leaves_with_path(tree):
        advice = f"The leaf is at {path}. The arguments are memory(state, step, batch)."
        require(is_valid(x), name, f"{expected} or its shape", x, advice, error=TypeError)


def _carry(step: Any, state: PyTree, target: NamedSharding | None) -> PyTree:
    """Returns the shapes and shardings of what a fit carries: the state, and its metrics."""
    # A fit replicates the leaves that have no sharding over the mesh of its batches.
    replicated = None if target is None else NamedSharding(target.mesh, PartitionSpec())

    def with_sharding(x: Any, shape: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
        sharding = getattr(x, "sharding", None)
        sharding = sharding if isinstance(sharding, NamedSharding) else replicated
        return jax.ShapeDtypeStruct(shape.shape, shape.dtype, sharding=sharding)

    carry = jax.tree.map(with_sharding, state, jax.eval_shape(_tree.copy, state))
    if not isinstance(step, MeteredStep) or isinstance(state, Metered):
        return carry
    return Metered(carry, jax.eval_shape(step.start, carry).metrics)


def _analyze_program(
    step: Any, carry: PyTree, chunk: PyTree, k: int, rewrites: Mode
) -> tuple[int, int]:
    """Compiles the program of a fit; returns the bytes of its logs and of its temporaries."""
    pins = _placement.read_pins(carry)
    platform = platform_of(carry)
    mode, takes_all = _rewrites.resolve_mode(rewrites, platform), prefers_static_length(platform)
    loop = LoopOptions(k, mode, platform, takes_all=takes_all, pins=pins)
    run: Any = program(step, TRAINING, loop)
    lowered = run.lower(carry, chunk, np.int32(k))
    stats, logs = lowered.compile().memory_analysis(), nbytes(lowered.out_info[1])
    # Results that could not reuse the buffer of a donated argument need memory, too.
    results = stats.output_size_in_bytes - stats.alias_size_in_bytes - logs
    return logs, int(stats.temp_size_in_bytes + max(0, results))


def _bytes_by_path(carry: PyTree) -> dict[str, int]:
    """Returns the bytes of each leaf by its path, the largest first."""
    # Metrics are carried beside the state: without this, the paths of its leaves would change.
    is_metered = isinstance(carry, Metered)
    parts = (carry.state, {"metrics": carry.metrics}) if is_metered else (carry,)
    leaves = itertools.chain.from_iterable(map(_tree.leaves_with_path, parts))
    return dict(collections.Counter({path: bytes_on_each(x) for path, x in leaves}).most_common())


def _bytes_by_part(leaves: Mapping[str, int]) -> dict[str, int]:
    """Returns the bytes of each part of the state, the largest first."""
    bytes_of_part: collections.Counter[str] = collections.Counter()
    # For other pytrees, the parts are the first components of the paths.
    is_train_state = any(path.startswith("params") for path in leaves)
    for path, size in leaves.items():
        name = path.partition("/")[0]
        is_part = not is_train_state or name in ("params", "opt_state", "model_state")
        bytes_of_part[name if is_part else "other"] += size
    return dict(bytes_of_part.most_common())
