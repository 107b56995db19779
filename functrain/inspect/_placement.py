"""A table of the leaves of a state, their shards, and the bytes that each device holds."""

import collections
import re
from collections.abc import Iterable
from typing import Any

import jax
from jax.sharding import AbstractMesh, NamedSharding
from rich.table import Table

from functrain.common import _repr, _table, _tree
from functrain.common._types import PyTree
from functrain.engine._plan import nbytes
from functrain.inspect._leaf import bytes_on_each, shard_shape, sharding_of

# Narrow enough for a terminal and for a page: long cells are broken into lines.
_WIDTH = 80
_MAX_PATH_WIDTH = 29


def placement(state: PyTree, shardings: PyTree = None) -> str:
    """Returns a table of the leaves, their shardings, shards and bytes, in 80 columns.

    Args:
      state: A state, or any pytree; concrete, or abstract as from ``jax.eval_shape``.
      shardings: Planned shardings, from `functrain.sharding.shardings`; by default those of the
        leaves.

    Returns:
      A row for each group of leaves: leaves whose paths differ only in numbers, such as those of
      equal layers, share a row if they are divided alike. `sharding` lists the mesh axis for
      each axis of the leaf, `-` for an axis that is not divided. `shard` is the shape that one
      device holds, followed by its bytes. The last lines are the total bytes on the devices.

    Raises:
      ValueError: The structure of the shardings is not that of the state (from `jax.tree.map`).

    Examples:
      >>> import functrain as ft, jax, jax.numpy as jnp
      >>> from jax.sharding import AbstractMesh, PartitionSpec as P
      >>> layer = {"kernel": jnp.zeros((256, 512)), "bias": jnp.zeros(512)}
      >>> params = {"layer_0": layer, "layer_1": layer}
      >>> mesh = AbstractMesh((4, 2), ("data", "model"))
      >>> rule = ft.sharding.rules({"**/kernel": P("data", "model"), "**": ft.sharding.replicated})
      >>> print(ft.inspect.placement(params, ft.sharding.shardings(params, mesh, rule)))
      mesh: data=4 model=2
      leaves          array                sharding     shard      bytes
      layer_*/bias    2 float32[512]       replicated   whole    2.0 KiB
      layer_*/kernel  2 float32[256, 512]  data, model  64x256  64.0 KiB
      each of 8 devices: 132.0 KiB of 1.0 MiB
    """
    if shardings is not None:
        state = jax.tree.map(_with_sharding, state, shardings)
    paths_by_row: dict[tuple[str, ...], list[str]] = {}
    arrays = []
    for path, leaf in _tree.leaves_with_path(state):
        if _tree.is_array(leaf):
            paths_by_row.setdefault(_row(path, leaf), []).append(path)
            arrays.append(leaf)
    lines = [*_meshes(arrays), _format_rows(paths_by_row), *_totals(arrays)]
    return "\n".join(lines)


def _row(path: str, leaf: Any) -> tuple[str, ...]:
    """Returns all that a row shows of a leaf, with `*` for the numbers in its path."""
    shape = shard_shape(leaf)
    return (
        re.sub(r"\d+", "*", path),
        _tree.strong_spec(leaf),
        _mesh_axes(leaf),
        "whole" if shape == leaf.shape else "x".join(map(str, shape)),
        _repr.format_bytes(bytes_on_each(leaf)),
    )


def _format_rows(paths_by_row: dict[tuple[str, ...], list[str]]) -> str:
    """Returns the table of the rows, each with the paths of its leaves."""
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    table.add_column("leaves", overflow="fold", max_width=_MAX_PATH_WIDTH)
    for name in ("array", "sharding", "shard"):
        table.add_column(name, overflow="fold")
    table.add_column("bytes", justify="right", no_wrap=True)
    for (_, spec, *cells), paths in paths_by_row.items():
        array = f"{len(paths)} {spec}" if len(paths) > 1 else spec
        table.add_row(_common_path(paths), array, *cells)
    return _table.render(table, _WIDTH)


def _with_sharding(x: Any, sharding: Any) -> Any:
    is_array = _tree.is_array(x)
    return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding) if is_array else x


def _common_path(paths: list[str]) -> str:
    """Returns one path for paths that differ in numbers only, with `*` for different numbers."""
    common = ""
    # The group in the pattern keeps the numbers, so each column is a number or the text between.
    split_paths = [re.split(r"(\d+)", path) for path in paths]
    for column in zip(*split_paths, strict=True):
        common += column[0] if len(set(column)) == 1 else "*"
    return common


def _mesh_axes(leaf: Any) -> str:
    """Returns the mesh axes that divide each axis of a leaf."""
    sharding = sharding_of(leaf)
    if sharding is None:
        return "one device"
    if sharding.is_fully_replicated:
        return "replicated"
    # Other kinds of shardings have no mesh, and no names to show.
    if not isinstance(sharding, NamedSharding):
        return type(sharding).__name__
    # A spec may be shorter than the shape: the other axes are not divided.
    texts = ["-"] * leaf.ndim
    for i, names in enumerate(sharding.spec):
        if names:
            texts[i] = "*".join(names) if isinstance(names, tuple) else names
    return ", ".join(texts)


def _meshes(leaves: list[Any]) -> list[str]:
    """Returns a line for each mesh that the leaves are on."""
    shardings = [x for x in map(sharding_of, leaves) if isinstance(x, NamedSharding)]
    meshes = dict.fromkeys(tuple(sharding.mesh.shape.items()) for sharding in shardings)
    return [f"mesh: {' '.join(f'{name}={size}' for name, size in mesh)}" for mesh in meshes]


def _totals(leaves: list[Any]) -> list[str]:
    """Returns lines with the bytes on the devices; devices that hold the same share a line."""
    bytes_of_device: collections.Counter[Any] = collections.Counter()
    # A leaf may be on some of the devices only, so each device is counted separately.
    for leaf in leaves:
        sharding = getattr(leaf, "sharding", None)
        devices: Iterable[Any]
        if sharding is None:
            devices = ["one device"]
        # An abstract mesh has a number of devices, but no device objects.
        elif isinstance(getattr(sharding, "mesh", None), AbstractMesh):
            devices = [f"device {i}" for i in range(sharding.num_devices)]
        else:
            devices = sharding.device_set
        bytes_of_device.update(dict.fromkeys(devices, bytes_on_each(leaf)))
    devices_by_bytes: dict[int, list[Any]] = {}
    for device, size in bytes_of_device.most_common():
        devices_by_bytes.setdefault(size, []).append(device)
    total = _repr.format_bytes(nbytes(leaves))
    lines = []
    for size, alike in devices_by_bytes.items():
        name = str(alike[0]) if len(alike) == 1 else f"each of {len(alike)} devices"
        lines.append(f"{name}: {_repr.format_bytes(size)} of {total}")
    return lines
