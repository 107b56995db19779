"""Rules that say how an array is divided over the axes of a mesh."""

import math
from collections.abc import Collection, Mapping
from typing import Any, Protocol

import jax
from jax.sharding import AbstractMesh, Mesh, PartitionSpec

from functrain.common._checks import require
from functrain.common._patterns import closest_patterns, matches
from functrain.common._tree import bullets, spec


class Rule(Protocol):
    """``(path, x, mesh) -> PartitionSpec``: how a leaf is divided.

    Examples:
      >>> from jax.sharding import PartitionSpec
      >>> def last_axis(path, x, mesh):
      ...     return PartitionSpec(*[None] * (x.ndim - 1), "model") if x.ndim else PartitionSpec()
    """

    def __call__(
        self, path: str, x: jax.ShapeDtypeStruct, mesh: Mesh | AbstractMesh, /
    ) -> PartitionSpec:
        """Returns the spec of a leaf, given its path in the params and its shape and dtype."""
        ...


def replicated(path: str, x: Any, mesh: Mesh | AbstractMesh, /) -> PartitionSpec:
    """The rule by which every device has all of every leaf.

    Examples:
      >>> tuple(replicated("dense/kernel", None, None))
      ()
    """
    return PartitionSpec()


def fsdp(axis: str | tuple[str, ...] = "data", *, min_size: int = 2**16) -> Rule:
    """Returns the rule of fully sharded data parallelism: each device has a part of each leaf.

    The largest axis of a leaf that the mesh's axis divides is divided, the last one of equals.
    Leaves that no axis divides, and small ones, are on all devices. With batches divided over the
    same axis the compiler gathers what a step needs, and sums its gradients (ZeRO stage 3,
    Rajbhandari et al., 2020, https://arxiv.org/abs/1910.02054): layer by layer where equal layers
    are a `jax.lax.scan`. Where activations are smaller than weights it may gather those instead;
    ``jax.lax.with_sharding_constraint(x, PartitionSpec("data"))`` in a layer keeps them divided.

    Args:
      axis: Of the mesh; several for their product.
      min_size: Elements below which a leaf is left whole.

    Returns:
      A rule.

    Examples:
      >>> import jax
      >>> from jax.sharding import AbstractMesh
      >>> eight = AbstractMesh((8,), ("data",))
      >>> tuple(fsdp()("kernel", jax.ShapeDtypeStruct((300, 4096), "float32"), eight))
      (None, 'data')
    """

    def rule(path: str, x: jax.ShapeDtypeStruct, mesh: Mesh | AbstractMesh, /) -> PartitionSpec:
        names = (axis,) if isinstance(axis, str) else axis
        _require_axes(names, mesh, f"fsdp({axis!r})")
        parts = math.prod(mesh.shape[name] for name in names)
        fitting = [i for i, n in enumerate(x.shape) if n % parts == 0]
        if math.prod(x.shape) < min_size or not fitting:
            return PartitionSpec()
        chosen = max(fitting, key=lambda i: (x.shape[i], i))
        return PartitionSpec(*[None] * chosen, axis)

    return rule


def rules(patterns: Mapping[str, PartitionSpec | Rule]) -> Rule:
    """Returns the rule that goes by the paths of leaves: the first pattern that fits counts.

    Args:
      patterns: By pattern over a path: `*` stands within one part, `**` for any number of parts.
        A PartitionSpec, or a rule.

    Returns:
      A rule. Where it is used, a pattern that fits no leaf is refused, and one whose leaves all
      go to patterns before it (but for `**`, which takes what is left); so is a leaf that no
      pattern fits, or whose axes the mesh does not divide.

    Examples:
      >>> import jax
      >>> from jax.sharding import AbstractMesh, PartitionSpec as P
      >>> rule = rules({"**/attention/**": P(None, "model"), "**": fsdp("data")})
      >>> mesh = AbstractMesh((4, 2), ("data", "model"))
      >>> tuple(rule("block/attention/kernel", jax.ShapeDtypeStruct((64, 64), "float32"), mesh))
      (None, 'model')
    """
    for pattern, x in patterns.items():
        is_rule = isinstance(x, PartitionSpec) or callable(x)
        expected = "a jax.sharding.PartitionSpec or a rule"
        require(is_rule, f"patterns[{pattern!r}]", expected, x, error=TypeError)
    return _Rules(patterns)


class _Rules:
    def __init__(self, patterns: Mapping[str, PartitionSpec | Rule]) -> None:
        self._patterns = dict(patterns)

    def __repr__(self) -> str:
        return f"rules({self._patterns})"

    def __call__(
        self, path: str, x: jax.ShapeDtypeStruct, mesh: Mesh | AbstractMesh, /
    ) -> PartitionSpec:
        for pattern, rule in self._patterns.items():
            if matches(pattern, path):
                return rule if isinstance(rule, PartitionSpec) else rule(path, x, mesh)
        raise ValueError(
            f"{path}: expected a rule for this leaf, {spec(x)}, got none among "
            f"{sorted(self._patterns)}. Add one for all that is left, "
            '"**": functrain.sharding.replicated.'
        )

    def require_use(self, paths: Collection[str]) -> None:
        """Raises ValueError if a pattern but `**` fits no leaf, or none that is left for it."""
        lines, left = [], set(paths)
        for i, pattern in enumerate(self._patterns):
            fitting = {path for path in paths if matches(pattern, path)}
            if not fitting:
                lines.append(f"{pattern}: perhaps {', '.join(closest_patterns(pattern, paths))}")
            elif not fitting & left and pattern != "**":
                before = list(self._patterns)[:i]
                others = [p for p in before if any(matches(p, x) for x in fitting)]
                lines.append(f"{pattern}: {', '.join(others)} came first, and fits all of its")
            left -= fitting
        if lines:
            raise ValueError(
                f"rules: expected patterns that fit a leaf, each at least one of its own, got\n"
                f"{bullets(lines)}\nThe first pattern that fits counts: put the narrower first."
            )


def require_fitting_spec(
    path: str, x: Any, wanted: PartitionSpec, mesh: Mesh | AbstractMesh
) -> None:
    """Raises ValueError unless leaf and mesh have the axes of a spec, and it divides the leaf."""
    if len(wanted) > x.ndim:
        raise ValueError(f"{path}: expected a spec of {x.ndim} axes at most, got {wanted}")
    for length, entry in zip(x.shape, wanted, strict=False):
        names = (entry,) if isinstance(entry, str) else entry or ()
        _require_axes(names, mesh, f"{path}: {wanted}")
        parts = math.prod(mesh.shape[name] for name in names)
        if length % parts:
            raise ValueError(
                f"{path}: expected {spec(x)} to be divided by {wanted}, but {length} is no "
                f"multiple of {parts}. Take another spec for it, or functrain.sharding.replicated."
            )


def _require_axes(names: Collection[str], mesh: Mesh | AbstractMesh, what: str) -> None:
    for name in names:
        require(name in mesh.shape, what, f"axes of the mesh, {tuple(mesh.shape)}", name)
