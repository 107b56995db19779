"""Rules that choose how an array is divided over the axes of a mesh."""

import math
from collections.abc import Collection, Mapping
from typing import Any, Protocol

import jax
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec

from functrain.common._checks import require
from functrain.common._patterns import first_match, group_paths
from functrain.common._tree import spec


class Rule(Protocol):
    """A function ``(path, x, mesh) -> PartitionSpec`` that chooses how a leaf is divided.

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
    """Returns the spec of a leaf that is replicated on every device; itself a rule.

    Examples:
      >>> tuple(replicated("dense/kernel", None, None))
      ()
    """
    return PartitionSpec()


def fsdp(axis: str | tuple[str, ...] = "data", *, min_size: int = 2**16) -> Rule:
    """Returns the rule of fully sharded data parallelism: each device holds a part of each leaf.

    Of the axes of a leaf that the size of the mesh axis divides, the largest one is divided, and of
    equal ones the last. Leaves without such an axis, and small leaves, are replicated. If batches
    are divided over the same mesh axis, the compiler gathers the weights that a step needs, and
    sums its gradients (ZeRO stage 3, Rajbhandari et al., 2020, https://arxiv.org/abs/1910.02054).
    It does so layer by layer if equal layers are a `jax.lax.scan`. If activations are smaller than
    weights, it may gather the activations instead;
    ``jax.lax.with_sharding_constraint(x, PartitionSpec("data"))`` in a layer keeps them divided.

    Args:
      axis: An axis of the mesh; or several, which count as one axis of their product.
      min_size: Leaves with fewer elements are replicated.

    Returns:
      A rule. Using it raises ValueError if the mesh lacks the axis.

    Examples:
      >>> import jax
      >>> from jax.sharding import AbstractMesh
      >>> eight = AbstractMesh((8,), ("data",))
      >>> tuple(fsdp()("kernel", jax.ShapeDtypeStruct((300, 4096), "float32"), eight))
      (None, 'data')
    """

    def rule(path: str, x: jax.ShapeDtypeStruct, mesh: Mesh | AbstractMesh, /) -> PartitionSpec:
        names = (axis,) if isinstance(axis, str) else axis
        expected = f"axes of the mesh, {tuple(mesh.shape)}"
        require(set(names) <= set(mesh.shape), f"fsdp({axis!r})", expected, names)
        shards = math.prod(map(mesh.shape.__getitem__, names))
        divisible = [i for i, n in enumerate(x.shape) if n % shards == 0]
        # Dividing a small leaf saves little memory, and costs a collective all the same.
        if math.prod(x.shape) < min_size or not divisible:
            return PartitionSpec()
        largest = max(divisible, key=lambda i: (x.shape[i], i))
        return PartitionSpec(*[None] * largest, axis)

    return rule


def rules(patterns: Mapping[str, PartitionSpec | Rule]) -> Rule:
    """Returns a rule that chooses by the path of a leaf: the first matching pattern counts.

    Args:
      patterns: Maps patterns over paths to a PartitionSpec or a rule. In a pattern, `*` matches
        within one part of a path, `**` matches any number of parts.

    Returns:
      A rule. Using it raises ValueError if a pattern matches no leaf, or only leaves that earlier
      patterns match (except for `**`, which takes all remaining leaves); and if no pattern matches
      a leaf, or the mesh does not divide its axes evenly.

    Examples:
      >>> import jax
      >>> from jax.sharding import AbstractMesh, PartitionSpec as P
      >>> rule = rules({"**/attention/**": P(None, "model"), "**": fsdp("data")})
      >>> mesh = AbstractMesh((4, 2), ("data", "model"))
      >>> tuple(rule("block/attention/kernel", jax.ShapeDtypeStruct((64, 64), "float32"), mesh))
      (None, 'model')
    """
    for pattern, rule in patterns.items():
        is_rule = isinstance(rule, PartitionSpec) or callable(rule)
        expected = "a jax.sharding.PartitionSpec or a rule"
        require(is_rule, f"patterns[{pattern!r}]", expected, rule, error=TypeError)
    return _Rules(patterns)


class _Rules:
    """The rule that `rules` returns; a class, so that `shardings` can ask it about its use."""

    def __init__(self, patterns: Mapping[str, PartitionSpec | Rule]) -> None:
        self._patterns = dict(patterns)

    def __repr__(self) -> str:
        return f"rules({self._patterns})"

    def __call__(
        self, path: str, x: jax.ShapeDtypeStruct, mesh: Mesh | AbstractMesh, /
    ) -> PartitionSpec:
        pattern = first_match(self._patterns, path)
        if pattern is None:
            raise ValueError(
                f"{path}: expected a rule for this leaf, {spec(x)}, got none among "
                f"{sorted(self._patterns)}. Add one for all remaining leaves, "
                '"**": functrain.sharding.replicated.'
            )
        rule = self._patterns[pattern]
        return rule if isinstance(rule, PartitionSpec) else rule(path, x, mesh)

    def require_use(self, paths: Collection[str]) -> None:
        """Raises ValueError if a pattern other than `**` is not the first one to match any leaf.

        The same holds for `rules` within these.
        """
        groups = group_paths("rules", self._patterns, paths)
        # All leaves together: if several patterns share rules, each may need another part of them.
        paths_by_rules: dict[_Rules, list[str]] = {}
        for pattern, rule in self._patterns.items():
            if isinstance(rule, _Rules):
                paths_by_rules.setdefault(rule, []).extend(groups[pattern])
        for rules_within, its_paths in paths_by_rules.items():
            rules_within.require_use(its_paths)


def require_fitting_spec(
    path: str, x: Any, partition_spec: PartitionSpec, mesh: Mesh | AbstractMesh
) -> None:
    """Raises ValueError unless leaf and mesh have the axes of a spec, and it divides the leaf."""
    expected = f"a spec of at most {x.ndim} axes"
    require(len(partition_spec) <= x.ndim, path, expected, partition_spec)
    try:
        NamedSharding(mesh, partition_spec).shard_shape(x.shape)
    except ValueError as error:
        raise ValueError(
            f"{path}: expected a spec that divides {spec(x)} evenly over axes of the mesh, got "
            f"{partition_spec}. Use another one for this leaf, or functrain.sharding.replicated. "
            f"{error}"
        ) from error
