"""The program that a fit would run, lowered for shapes: nothing is computed or allocated."""

from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from functrain.common import _tree
from functrain.common._checks import require, require_integer
from functrain.common._platform import platform_of
from functrain.common._types import PyTree
from functrain.common._warnings import warn
from functrain.engine import _placement
from functrain.engine._plan import auto_steps, nbytes
from functrain.engine._programs import TRAINING, loop_options, program
from functrain.metrics._metric import Metered
from functrain.rewrites import Mode
from functrain.step._check import check_step
from functrain.step._metered import MeteredStep
from functrain.targets._chips import Chip, chip_of, device_of, is_present, known_chip
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
    state: PyTree,
    step: Any,
    batch: PyTree,
    *,
    fuse: int | None = None,
    target: Target | None = None,
    sharding: _placement.ShardingArg = None,
    rewrites: Mode = "auto",
) -> FitProgram:
    """Lowers the program that a fit would run; see `functrain.inspect.memory` for the arguments."""
    check_step(step)
    require_batch_shapes(batch)
    if fuse is not None:
        require_integer("fuse", fuse, advice="Leave it out for the number that a fit chooses.")
    expected, advice = "a target from functrain.target, or None", "Call functrain.target(name)."
    is_target = target is None or isinstance(target, Target)
    require(is_target, "target", expected, target, advice, error=TypeError)
    mesh_sharding = _placement.batch_sharding(sharding)
    carry = _carry(step, state, mesh_sharding, target)
    platform, device = platform_of(carry), device_of(carry)
    chip = chip_of(device) if target is None else target.chip
    # As `accelerator_of`, except that a target may be a GPU that is not in the table.
    accelerator = None if platform == "cpu" else known_chip(device.device_kind) or chip
    k = fuse or auto_steps(nbytes(batch), nbytes(state), chip=accelerator)
    chunk = _placement.chunk_shapes(batch, k, mesh_sharding)
    options = loop_options(carry, rewrites=rewrites).with_steps(k, is_full=True)
    run: Any = program(step, TRAINING, options)
    return FitProgram(k, carry, chunk, run.lower(carry, chunk, np.int32(k)), chip)


def require_batch_shapes(batch: PyTree) -> None:
    """Raises TypeError unless the leaves of a batch are arrays with axes, or their shapes."""
    for path, x in _tree.leaves_with_path(batch):
        is_valid = _tree.is_array(x) and x.shape
        expected = "an array [B, ...] or its jax.ShapeDtypeStruct"
        advice = "Pass one batch, such as loader.batch(0, 0)."
        require(is_valid, f"batch: {path}", expected, x, advice, error=TypeError)


def _carry(
    step: Any, state: PyTree, batch_sharding: NamedSharding | None, target: Target | None
) -> PyTree:
    """Returns the shapes and shardings of what a fit carries: the state, and its metrics."""
    # Without a mesh for the batches, jax replicates leaves that have no sharding over the mesh of
    # the state when it runs the first program.
    leaf_shardings = [getattr(x, "sharding", None) for x in jax.tree.leaves(state)]
    on_mesh = [x for x in (batch_sharding, *leaf_shardings) if isinstance(x, NamedSharding)]
    mesh_sharding = on_mesh[0] if on_mesh else None
    carry = _placement.abstract_on_mesh(state, mesh_sharding)
    if isinstance(step, MeteredStep) and not isinstance(state, Metered):
        metrics = jax.eval_shape(step.start, carry).metrics
        carry = Metered(carry, _placement.abstract_on_mesh(metrics, mesh_sharding))
    if target is None:
        return carry
    default = None
    if mesh_sharding is not None:
        mesh, expected = mesh_sharding.mesh, f"a mesh of the devices of {target}"
        is_of_target = mesh_sharding.device_set <= set(target.devices)
        advice = "Make it with target.mesh({'data': -1})."
        require(is_of_target, "sharding", expected, mesh, advice)
        default = NamedSharding(mesh, PartitionSpec())
    # Leaves that are not placed on the target are moved to it.
    carry = target.shapes(carry, default)
    is_on_one_device = all(x.sharding.num_devices == 1 for x in jax.tree.leaves(carry))
    if len(target.devices) > 1 and is_on_one_device and not is_present(target.devices[0]):
        warn(
            f"target: {target.name!r} has {len(target.devices)} devices, and without sharding= the "
            "program uses one of them. Pass sharding=target.mesh({'data': -1})."
        )
    return carry
