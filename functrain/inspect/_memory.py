"""The memory that a fit needs, from its compiled program, before anything runs."""

import collections
import dataclasses
import re
from collections.abc import Mapping
from typing import Any

import jax

from functrain.common import _repr, _tree
from functrain.common._platform import platform_of
from functrain.common._table import sheet
from functrain.common._types import PyTree, Step
from functrain.engine import _placement
from functrain.engine._driver import RUN_AHEAD
from functrain.engine._plan import nbytes
from functrain.inspect._fit_program import FitProgram, lower_fit
from functrain.inspect._leaf import bytes_on_each
from functrain.metrics._metric import Metered
from functrain.rewrites import Mode
from functrain.targets._chips import Chip
from functrain.targets._target import Target

# Leaves of the printed table; all of them are in `Memory.leaves`.
ROWS = 12

# Chunks that exist at once: one for each program in flight, and the one being assembled meanwhile.
CHUNKS = RUN_AHEAD + 1


@dataclasses.dataclass(frozen=True)
class Memory:
    """The memory that a fit needs on each device, in bytes, from `memory`. Prints as a table.

    Attributes:
      k: Steps per program.
      leaves: Each leaf of the state and of its metrics by path, the largest first.
      parts: Each part of the state by its field, such as params, opt_state and model_state.
      original_state: The caller's state, which a fit copies; 0 with ``donate=True``.
      chunks: The chunks of K batches that are in memory at once, at most.
      logs: The logs of the programs in flight.
      temporaries: Other memory of the program: activations, gradients.
      checkpoint_copy: The copy that a checkpointer writes while training continues. 0 without a
        checkpointer, and on accelerators, whose copy is in the memory of the host.
      padding: Bytes that an accelerator adds to arguments whose shapes do not fit its tiles.
      chip: The device, with its memory; None if that is not known.
      is_refused: True if the compiler refused the program as too large. It counts more than this
        report, so it may do so even where `total` seems to fit.

    Examples:
      >>> needed = Memory(8, {"w": 4000}, {"w": 4000}, 4000, 300, 96, 8000)
      >>> needed, needed.state, needed.total
      (Memory(16.0 KiB: state=3.9 KiB, k=8), 4000, 16396)
    """

    k: int
    leaves: Mapping[str, int]
    parts: Mapping[str, int]
    original_state: int
    chunks: int
    logs: int
    temporaries: int
    checkpoint_copy: int = 0
    padding: int = 0
    chip: Chip | None = None
    is_refused: bool = False

    @property
    def state(self) -> int:
        """The bytes of one copy of the state, with its metrics."""
        return sum(self.leaves.values())

    @property
    def total(self) -> int:
        """The bytes of all copies of the state, and of everything else."""
        copies = self.state + self.original_state + self.checkpoint_copy
        return copies + self.chunks + self.logs + self.temporaries + self.padding

    @property
    def fits(self) -> bool | None:
        """True if the total fits into the memory of the device; None if that is not known."""
        if self.chip is None:
            return None
        return not self.is_refused and self.total <= self.chip.memory_bytes

    def __repr__(self) -> str:
        total, state = map(_repr.format_bytes, (self.total, self.state))
        fits = {None: "", True: ", fits", False: ", does not fit"}[self.fits]
        return f"Memory({total}: state={state}, k={self.k}{fits})"

    def _repr_pretty_(self, printer: Any, cycle: bool) -> None:
        """Shows the tables in a notebook, as `print` does."""
        printer.text(str(self))

    def __str__(self) -> str:
        """Returns a table of the largest leaves, the parts of the state and all other memory.

        It is at most 80 columns wide.
        """
        leaves = list(self.leaves.items())
        if len(leaves) > ROWS:
            hidden_size = sum(size for _, size in leaves[ROWS:])
            leaves[ROWS:] = [(f"other leaves ({len(leaves) - ROWS})", hidden_size)]
        sections = [
            leaves,
            [(f"{name} (total)", size) for name, size in self.parts.items()],
            [
                ("state", self.state),
                ("your original state", self.original_state),
                ("checkpoint copy", self.checkpoint_copy),
                (f"{CHUNKS} chunks of {self.k} batch{'es' if self.k > 1 else ''}", self.chunks),
                ("logs", self.logs),
                ("program temporaries", self.temporaries),
                ("padding", self.padding),
            ],
            [("total", self.total)],
        ]
        rows = [
            [(_repr.shorten_start(name, 60), _repr.format_bytes(size)) for name, size in section]
            for section in sections
        ]
        table = sheet(["memory of a fit", "bytes"], *rows, numbers=["bytes"])
        return table if self.chip is None else "\n".join([table, *self._verdict(self.chip)])

    def _verdict(self, chip: Chip) -> list[str]:
        """Returns lines that say whether it fits, and what to do if it does not."""
        free_bytes = chip.memory_bytes - self.total
        size, room = _repr.format_bytes(abs(free_bytes)), _repr.format_bytes(chip.memory_bytes)
        if self.fits:
            lines = [f"It fits: {size} of {room} are free ({chip.name})."]
            if free_bytes * 50 < chip.memory_bytes:
                lines.append("Evaluations, hooks and compiled code are not counted.")
            return lines
        reason = f"{size} more than {room}" if free_bytes < 0 else "the compiler refused it"
        return [f"It does not fit: {reason} ({chip.name}).", *self.advice()]

    def advice(self) -> list[str]:
        """Returns what would need less memory, as lines, what saves most first.

        Examples:
          >>> Memory(8, {"w": 4000}, {"w": 4000}, 4000, 300, 96, 8000).advice()[0]
          '- 7.8 KiB of temporaries: a smaller batch, ft.micro_batches, or ft.remat.'
        """
        remedies = {
            "temporaries: a smaller batch, ft.micro_batches, or ft.remat": self.temporaries,
            "state: divide it over the chips of a slice, with ft.sharding.fsdp": self.state,
            "your original state: fit(donate=True) takes it over": self.original_state,
            f"chunks: fewer steps per program than fuse={self.k}": self.chunks,
        }
        # Savings below a hundredth of all of it do not matter.
        return [
            f"- {_repr.format_bytes(size)} of {text}."
            for text, size in sorted(remedies.items(), key=lambda remedy: -remedy[1])
            if size * 100 > self.total
        ]


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
    target: Target | None = None,
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
      target: The devices to compile for, from `functrain.target`; by default those on which the
        state is placed, or this machine. They need not be there.

    Returns:
      A `Memory` with numbers of bytes; print it for a table. For a target, and for an accelerator
      of this machine, it also says whether that fits, and what to do if it does not. On CPU with
      jaxlib 0.10, a fit may take one copy of the largest param more: YNNPACK copies an operand of
      a matrix product into memory that the compiler does not report.

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
    program = lower_fit(
        state, step, batch, fuse=fuse, target=target, sharding=sharding, rewrites=rewrites
    )
    leaves = _bytes_by_path(program.carry)
    state_bytes, chunk_bytes = sum(leaves.values()), bytes_on_each(program.chunk)
    logs = nbytes(program.lowered.out_info[1])
    # On accelerators the copy is fetched to the host before it is written.
    is_cpu = platform_of(program.carry) == "cpu"
    temporaries, arguments, is_refused = _compile(program, logs, max(leaves.values(), default=0))
    return Memory(
        k=program.k,
        leaves=leaves,
        parts=_bytes_by_part(leaves),
        # A donated state is reused for the results.
        original_state=0 if donate else state_bytes,
        chunks=CHUNKS * chunk_bytes,
        logs=CHUNKS * logs,
        temporaries=temporaries,
        checkpoint_copy=state_bytes if checkpointer is not None and is_cpu else 0,
        padding=0 if is_cpu else max(0, arguments - state_bytes - chunk_bytes),
        chip=None if is_cpu and target is None else program.chip,
        is_refused=is_refused,
    )


def _compile(program: FitProgram, logs: int, largest_leaf: int) -> tuple[int, int, bool]:
    """Returns the bytes of temporaries and arguments, and True if the compiler refuses a program.

    Args:
      program: The program.
      logs: The bytes of its logs.
      largest_leaf: The bytes of the largest leaf of the state.
    """
    try:
        stats = program.lowered.compile().memory_analysis()
    except jax.errors.JaxRuntimeError as error:
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
        # A leaf that is larger than the memory is refused before temporaries are counted.
        is_leaf = largest_leaf > program.chip.memory_bytes
        return 0 if is_leaf else _refused_bytes(str(error)), 0, True
    # Results that could not reuse the buffer of a donated argument need memory, too.
    results = stats.output_size_in_bytes - stats.alias_size_in_bytes - logs
    temporaries = stats.temp_size_in_bytes + max(0, results)
    return int(temporaries), int(stats.argument_size_in_bytes), False


def _refused_bytes(message: str) -> int:
    """Returns the bytes of temporaries that a compiler names as it refuses a program, or else 0.

    Examples:
      >>> _refused_bytes("RESOURCE_EXHAUSTED: Used 2.0K of 1.0K hbm.     program     1.50K")
      1536
      >>> _refused_bytes("RESOURCE_EXHAUSTED: Allocation (size=8192) would exceed memory")
      8192
      >>> _refused_bytes("RESOURCE_EXHAUSTED: required for HLO temporaries (16.0G) exceeds HBM")
      17179869184
    """
    size = re.search(r"(?:program +|size=|temporaries \()([\d.]+)([KMGT]?)", message)
    return int(float(size[1]) * 1024 ** " KMGT".index(size[2] or " ")) if size else 0


def _bytes_by_path(carry: PyTree) -> dict[str, int]:
    """Returns the bytes of each leaf by its path, the largest first."""
    # Metrics are carried beside the state: without this, the paths of its leaves would change.
    parts = [carry.state, {"metrics": carry.metrics}] if isinstance(carry, Metered) else [carry]
    sizes: collections.Counter[str] = collections.Counter()
    # Paths may be equal, as those of {"a/b": x, "a": {"b": y}}.
    for part in parts:
        for path, x in _tree.leaves_with_path(part):
            sizes[path] += bytes_on_each(x)
    return dict(sizes.most_common())


def _bytes_by_part(leaves: Mapping[str, int]) -> dict[str, int]:
    """Returns the bytes of each part of the state, the largest first."""
    parts: collections.Counter[str] = collections.Counter()
    for path, size in leaves.items():
        parts[path.partition("/")[0]] += size
    return dict(parts.most_common())
