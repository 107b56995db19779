"""The program that a fit would run, lowered for shapes: nothing is computed or allocated."""

import contextlib
import re
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec, Sharding, SingleDeviceSharding

from functrain import rewrites as _rewrites
from functrain.common import _repr, _tree
from functrain.common._checks import is_number, require, require_integer
from functrain.common._platform import compiling_for, platform_of
from functrain.common._types import PyTree
from functrain.common._warnings import warn
from functrain.data._batch import require_batch
from functrain.engine import _placement
from functrain.engine._plan import auto_steps, nbytes
from functrain.engine._programs import (
    TRAINING,
    LoopOptions,
    prefers_static_length,
    program,
)
from functrain.metrics._metric import Metered
from functrain.rewrites import Mode
from functrain.step._check import check_step
from functrain.step._metered import MeteredStep
from functrain.targets._chips import Chip, chip_of, device_of, is_present, known_chip
from functrain.targets._compilers import quiet_compiler
from functrain.targets._target import Target


class FitProgram(NamedTuple):
    """The lowered program of a fit.

    Attributes:
      k: Steps per program.
      carry: Shapes and shardings of the state and its metrics.
      chunk: Shapes and shardings of K batches.
      lowered: The program.
      chip: The device that it is made for.
    """

    k: int
    carry: PyTree
    chunk: PyTree
    lowered: Any
    chip: Chip


def lower_fit(
    name: str,
    state: PyTree,
    step: Any,
    batch: PyTree,
    *,
    fuse: int | None = None,
    target: Target | None = None,
    sharding: _placement.ShardingArg = None,
    rewrites: Mode = "auto",
) -> FitProgram:
    """Lowers the program that a fit would run; see `functrain.inspect.memory` for the arguments.

    Args:
      name: The public function, for messages.
      state: The state, or its shapes.
      step: The step.
      batch: One batch, or its shapes.
      fuse: Steps per program; None for the number that a fit chooses.
      target: The devices to compile for.
      sharding: The sharding of one batch.
      rewrites: As in `fit`.
    """
    check_step(step)
    require_batch(batch)
    if fuse is not None:
        require_integer("fuse", fuse, advice="Leave it out for the number that a fit chooses.")
    require_arrays(name, state, batch)
    mesh_sharding = _placement.batch_sharding(sharding)
    _require_devices(target, state, mesh_sharding)
    own_shardings = map(_own_sharding, jax.tree.leaves(state))
    meshes = [x.mesh for x in (mesh_sharding, *own_shardings) if isinstance(x, NamedSharding)]
    default: Sharding | None = None
    if meshes:
        # A fit replicates the leaves that have no sharding over the mesh of its batches. Without
        # one, jax replicates them over that of the state when it runs the first program.
        default = NamedSharding(meshes[0], PartitionSpec())
    elif target is not None:
        default = SingleDeviceSharding(target.devices[0])
    carry = _carry(step, state, default)
    _warn_about_idle_devices(target, carry)
    platform = platform_of(carry)
    device = device_of(carry)
    chip = chip_of(device) if target is None else target.chip
    # As `accelerator_of`, except that a target may be a GPU that is not in the table.
    accelerator = None if platform == "cpu" else known_chip(device.device_kind) or chip
    k = fuse or auto_steps(nbytes(batch), nbytes(state), chip=accelerator)
    chunk = _placement.chunk_shapes(batch, k, mesh_sharding)
    options = LoopOptions(
        k,
        _rewrites.resolve_mode(rewrites, platform),
        platform,
        takes_all=prefers_static_length(platform),
        pins=_placement.read_pins(carry),
        on_chip_bytes=accelerator.on_chip_bytes if accelerator else 0,
    )
    run = program(step, TRAINING, options)
    return FitProgram(k, carry, chunk, _lower(run, carry, chunk, np.int32(k)), chip)


def _lower(run: Any, carry: PyTree, *args: Any) -> Any:
    """Lowers a program for the devices on which its carry is placed."""
    sharding, *others = {x.sharding for x in jax.tree.leaves(carry)} or {None}
    if others or not isinstance(sharding, SingleDeviceSharding):
        return run.lower(carry, *args)
    # A fit on one device commits its arrays to none. With their shardings, the program would have
    # another key in jax's compilation cache. It is traced without the default device, since
    # constants are made there.
    with compiling_for(platform_of(carry)):
        traced = run.trace(_tree.shapes(carry), *args)
    (device,) = sharding.device_set
    with jax.default_device(device):
        return traced.lower()


def _require_devices(target: Any, state: PyTree, sharding: NamedSharding | None) -> None:
    """Raises an error unless the state and the mesh of the batches are those of the target."""
    if target is None:
        return
    expected = "a target from functrain.target, or None"
    advice = f"Pass functrain.target({target!r})." if isinstance(target, str) else ""
    require(isinstance(target, Target), "target", expected, target, advice, error=TypeError)
    devices = set(target.devices)
    if sharding is not None:
        advice = "Make the mesh with target.mesh({'data': -1})."
        is_of_target = sharding.device_set <= devices
        require(
            is_of_target, "sharding", f"a mesh of the devices of {target}", sharding.mesh, advice
        )
    for path, x in _tree.leaves_with_path(state):
        own_sharding = _own_sharding(x)
        advice = f"The leaf is at {path}. Place its shape with target.shapes(state, shardings)."
        is_of_target = own_sharding is None or own_sharding.device_set <= devices
        require(is_of_target, "state", f"leaves on the devices of {target}", own_sharding, advice)
        if own_sharding is not None and sharding is not None:
            is_of_mesh = own_sharding.device_set == sharding.device_set
            expected = "leaves on the mesh of the batches"
            require(is_of_mesh, "state", expected, own_sharding, advice)


def _warn_about_idle_devices(target: Target | None, carry: PyTree) -> None:
    """Warns if a program for a slice would run on one of its devices."""
    if target is None or len(target.devices) == 1 or target.devices[0] in jax.devices():
        return
    if all(x.sharding.num_devices == 1 for x in jax.tree.leaves(carry)):
        warn(
            f"target: {target.name!r} has {len(target.devices)} devices, and without sharding= the "
            "program uses one of them. Pass sharding=target.mesh({'data': -1})."
        )


def require_arrays(name: str, state: PyTree, batch: PyTree) -> None:
    """Raises TypeError unless the leaves of the arguments are arrays, those of the batch with axes.

    Args:
      name: The public function, for messages.
      state: The state, or its shapes.
      batch: One batch, or its shapes.
    """
    order = f"The arguments are {name}(state, step, batch)."
    _require_leaves("state", state, lambda x: _tree.is_array(x) or is_number(x), "an array", order)
    expected = "an array [B, ...]"
    _require_leaves("batch", batch, lambda x: _tree.is_array(x) and x.shape, expected, order)


def _require_leaves(
    name: str, tree: PyTree, is_valid: Callable[[Any], Any], expected: str, order: str
) -> None:
    """Raises TypeError if a leaf of the argument is not valid."""
    for path, x in _tree.leaves_with_path(tree):
        advice = f"The leaf is at {path}. {order}"
        expected_leaf = f"{expected} or its jax.ShapeDtypeStruct"
        require(is_valid(x), name, expected_leaf, x, advice, error=TypeError)


def _carry(step: Any, state: PyTree, default: Sharding | None) -> PyTree:
    """Returns the shapes and shardings of what a fit carries: the state, and its metrics.

    Without a default, arrays that were put on a device stay there.
    """

    def with_sharding(x: Any, shape: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
        sharding = _own_sharding(x) or default
        if sharding is None and getattr(x, "committed", False):
            sharding = x.sharding
        return jax.ShapeDtypeStruct(shape.shape, shape.dtype, sharding=sharding)

    carry = jax.tree.map(with_sharding, state, jax.eval_shape(_tree.copy, state))
    if not isinstance(step, MeteredStep) or isinstance(state, Metered):
        return carry
    metrics = jax.eval_shape(step.start, carry).metrics
    return Metered(carry, jax.tree.map(with_sharding, metrics, metrics))


def _own_sharding(x: Any) -> Sharding | None:
    """Returns the sharding that a leaf of the state keeps: shapes that of theirs, if any.

    Of arrays only those that are divided.
    """
    sharding: Sharding | None = getattr(x, "sharding", None)
    is_placed = isinstance(sharding, NamedSharding) or not isinstance(x, jax.Array)
    return sharding if is_placed else None


_SINGLE_BUFFER = re.compile(
    r"Allocation \(size=(\d+)\) would exceed memory \(size=(\d+)\).*?shape: (\w+\[[\d,]*\])"
)


class TooLargeError(MemoryError):
    """The compiler's refusal of a program that is larger than the memory of the device.

    Attributes:
      program: Bytes of the program's temporaries.
      arguments: Bytes of its arguments.
      reserved: Bytes that the compiler keeps for itself.
      capacity: Bytes that a program may use.
      largest: The largest temporaries: their bytes, and the operation that makes them.
      is_one_buffer: True if a single buffer exceeds the memory. The compiler counts no others then,
        and the buffer may be an argument.
    """

    def __init__(self, message: str) -> None:
        sizes_by_name = dict(
            re.findall(r"^ +(reserved|program|arguments) +([\d.]+[BKMGT])", message, re.MULTILINE)
        )
        self.reserved, self.program, self.arguments = (
            parse_bytes(sizes_by_name.get(name, "0B"))
            for name in ("reserved", "program", "arguments")
        )
        capacity = re.search(r"of ([\d.]+[KMGT]) hbm", message)
        self.capacity = parse_bytes(capacity[1]) if capacity else 0
        allocations = re.findall(r"Size: (\S+)\n +Operator: op_name=\"(.*)\"\n", message)
        self.largest = [(parse_bytes(size), op_name) for size, op_name in allocations]
        # A buffer that is larger than the whole memory is refused before all others are counted.
        single = _SINGLE_BUFFER.search(message)
        self.is_one_buffer = single is not None
        if single:
            self.program, self.capacity = int(single[1]), int(single[2])
            self.largest = [(self.program, single[3])]
        sizes = map(_repr.format_bytes, (self.program, self.arguments, self.capacity))
        text = "{} of temporaries and {} of arguments do not fit into {}".format(*sizes)
        # The compiler does not always count the arguments.
        text = text if self.arguments else text.replace(" and 0 B of arguments", "")
        lines = [
            f"{_repr.format_bytes(size)} in {op_name}"
            for size, op_name in self.largest[:5]
            if size * 100 > self.program
        ]
        if single:
            size, room = map(_repr.format_bytes, (self.program, self.capacity))
            text, lines = f"one buffer, {single[3]}, takes {size} of {room}", []
        if not self.program:
            text, lines = message.partition("\n")[0].removesuffix("."), []
        largest = f". The largest temporaries:\n{_tree.bullets(lines)}" if lines else "."
        super().__init__(f"The program is too large for the device: {text}{largest}")
        self.add_note(
            "functrain.inspect.memory and bridge.memory list what would need less memory."
        )


def parse_bytes(text: str) -> int:
    """Returns the bytes of a size as XLA writes it: 40.00G, 258.00M, 16.0K or 512B.

    Examples:
      >>> parse_bytes("1.5K"), parse_bytes("512B")
      (1536, 512)
    """
    units = {unit: 1024**i for i, unit in enumerate("BKMGT")}
    return int(float(text[:-1]) * units[text[-1]])


def compile_program(program: FitProgram) -> Any:
    """Compiles a lowered program.

    Raises:
      TooLargeError: It is larger than the memory of its device, as its compiler says.
    """
    is_here = is_present(device_of(program.carry))
    try:
        with contextlib.nullcontext() if is_here else quiet_compiler():
            return program.lowered.compile()
    except jax.errors.JaxRuntimeError as error:
        message = str(error)
        if "RESOURCE_EXHAUSTED" not in message:
            raise
    # Outside of `except`: the compiler's message, of hundreds of lines, is not repeated.
    raise TooLargeError(message)
