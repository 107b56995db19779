"""What lies where: a table of leaves, and of the bytes that each device holds."""

import collections
import math
import re
from collections.abc import Iterator
from typing import Any

import jax
from jax.sharding import NamedSharding, PartitionSpec
from rich.table import Table

from functrain.common import _repr, _table, _tree
from functrain.common._types import PyTree

_COLUMNS = 80
_PATHS = 29  # of them, at the most


def describe(state: PyTree, shardings: PyTree = None) -> str:
    """Returns what lies where, as text of 80 columns: leaves, their parts, and each device's bytes.

    Args:
      state: A state, or any pytree; concrete, or abstract as from ``jax.eval_shape``.
      shardings: Where its leaves are to lie, from `functrain.sharding.shardings`; by default
        where they are.

    Returns:
      A row for the leaves of each kind: paths that differ in numbers only, as those of equal
      layers, share one where they lie alike. `over` has the mesh's axis for each axis of the
      leaf, `-` for those that are whole; `part` is the shape that one device holds, with its
      bytes. Below, what the devices hold in all.

    Raises:
      ValueError: The shardings have another structure than the state.

    Examples:
      >>> import functrain as ft, jax, jax.numpy as jnp
      >>> from jax.sharding import AbstractMesh, PartitionSpec as P
      >>> layer = {"kernel": jnp.zeros((256, 512)), "bias": jnp.zeros(512)}
      >>> params = {"layer_0": layer, "layer_1": layer}
      >>> mesh = AbstractMesh((4, 2), ("data", "model"))
      >>> rule = ft.sharding.rules({"**/kernel": P("data", "model"), "**": ft.sharding.replicated})
      >>> print(describe(params, ft.sharding.shardings(params, mesh, rule)))
      mesh: data=4 model=2
      leaves          array           over         part       bytes
      layer_*/bias    2 f32[512]      all alike    whole    2.0 KiB
      layer_*/kernel  2 f32[256,512]  data, model  64x256  64.0 KiB
      each of 8 devices: 132.0 KiB of 1.0 MiB
    """
    leaves = list(_placed(state, shardings))
    kinds: dict[Any, list[str]] = {}
    for path, leaf, where in leaves:
        has = _short(leaf), _over(leaf, where), _part(leaf, where), _bytes(leaf, where)
        kinds.setdefault((re.sub(r"\d+", "*", path), *has), []).append(path)
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    table.add_column("leaves", no_wrap=True)
    for name in ("array", "over", "part"):
        table.add_column(name, overflow="fold")
    table.add_column("bytes", justify="right", no_wrap=True)
    for (_, spec, over, part, size), paths in kinds.items():
        array = f"{len(paths)} {spec}" if len(paths) > 1 else spec
        table.add_row(_broken(_common(paths)), array, over, part, _repr.size(size))
    return "\n".join([*_meshes(leaves), _table.text(table, _COLUMNS), *_totals(leaves)])


def _common(paths: list[str]) -> str:
    """Returns paths that differ in numbers only as one, with `*` for those that differ."""
    parts = zip(*(re.split(r"(\d+)", path) for path in paths), strict=True)
    return "".join(found[0] if len(set(found)) == 1 else "*" for found in parts)


def _short(leaf: Any) -> str:
    """Returns dtype and shape as jax shortens them, ``f32[8,3]``."""
    text = _tree.strong_spec(leaf).replace(", ", ",")
    for long, short in (("float", "f"), ("uint", "u"), ("int", "i")):
        text = text.replace(long, short)
    return text


def _broken(path: str) -> str:
    """Returns a path as lines that leave room for the other columns, broken between its parts."""
    lines = [""]
    for part in re.findall(r"[^/]*/?", path):
        if len(lines[-1]) + len(part) > _PATHS:
            lines.append("")
        lines[-1] += part
    return "\n".join(_repr.ending(line, _PATHS) for line in lines if line)


Placed = tuple[str, Any, Any]


def _placed(state: PyTree, shardings: PyTree) -> Iterator[Placed]:
    """Yields each array's path, itself and its sharding, or None."""
    if shardings is None:
        wheres = [getattr(leaf, "sharding", None) for leaf in jax.tree.leaves(state)]
    elif _tree.structure(shardings) == _tree.structure(state):
        wheres = jax.tree.leaves(shardings)
    else:
        raise ValueError(
            "shardings: expected those of the state, functrain.sharding.shardings(state, mesh, "
            f"rule), got another structure:\n{_tree.structure(shardings)}"
        )
    for (path, leaf), where in zip(_tree.leaves_with_path(state), wheres, strict=True):
        if _tree.is_array(leaf):
            yield path, leaf, where if getattr(where, "num_devices", 1) > 1 else None


def _over(leaf: Any, where: Any) -> str:
    if where is None:
        return "one device"
    if where.is_fully_replicated:
        return "all alike"
    if not isinstance(where, NamedSharding):
        return type(where).__name__
    spec = where.spec + PartitionSpec(*[None] * (leaf.ndim - len(where.spec)))
    return ", ".join("-" if x is None else x if isinstance(x, str) else "*".join(x) for x in spec)


def _part(leaf: Any, where: Any) -> str:
    shape = leaf.shape if where is None else where.shard_shape(leaf.shape)
    return "whole" if shape == leaf.shape else "x".join(map(str, shape))


def _bytes(leaf: Any, where: Any = None) -> int:
    shape = leaf.shape if where is None else where.shard_shape(leaf.shape)
    return int(math.prod(shape) * leaf.dtype.itemsize)


def _meshes(leaves: list[Placed]) -> list[str]:
    found = [where.mesh for _, _, where in leaves if isinstance(where, NamedSharding)]
    shapes = dict.fromkeys(" ".join(f"{n}={k}" for n, k in mesh.shape.items()) for mesh in found)
    return [f"mesh: {shape}" for shape in shapes]


def _totals(leaves: list[Placed]) -> list[str]:
    """Returns what each device holds, devices that hold as much in one line."""
    whole = sum(_bytes(leaf) for _, leaf, _ in leaves)
    held: collections.Counter[Any] = collections.Counter()
    for _, leaf, where in leaves:
        for device in _devices(leaf, where):
            held[device] += _bytes(leaf, where)
    lines = []
    for size in sorted(set(held.values()), reverse=True):
        devices = [device for device, own in held.items() if own == size]
        who = str(devices[0]) if len(devices) == 1 else f"each of {len(devices)} devices"
        lines.append(f"{who}: {_repr.size(size)} of {_repr.size(whole)}")
    return lines


def _devices(leaf: Any, where: Any) -> list[Any]:
    if where is None:
        own = getattr(leaf, "devices", lambda: {"one device"})
        return sorted(own(), key=str)
    if isinstance(where, NamedSharding) and isinstance(where.mesh, jax.sharding.AbstractMesh):
        return list(range(where.mesh.size))
    return sorted(where.device_set, key=lambda device: device.id)
