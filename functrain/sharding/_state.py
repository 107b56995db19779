"""The shardings of a whole state, derived from those of its params."""

from collections.abc import Callable
from typing import Any

import jax
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec

from functrain.common import _tree
from functrain.common._types import PyTree
from functrain.rewrites._compile import jit
from functrain.sharding._rules import Rule, require_fitting_spec


def shardings(state: PyTree, mesh: Mesh | AbstractMesh, rule: Rule) -> PyTree:
    """Returns the sharding of each leaf of a state, in the structure of the state.

    The rule chooses the shardings of params and model_state. Leaves of the optimizer's state, and
    of fields that a subclass of `TrainState` adds, get the sharding of the param that they belong
    to: moments, averages, accumulated gradients, and stacks of these. They are recognized by the
    end of their path and their shape, whatever the optimizer. All other leaves, such as counts and
    factored moments, are replicated.

    Args:
      state: A `TrainState`, or any pytree that contains some; concrete, or abstract as from
        ``jax.eval_shape``. A pytree without a `TrainState` counts as params.
      mesh: A mesh from `mesh`, or from jax.
      rule: Chooses how a leaf is divided: `rules`, `fsdp`, `replicated`, or a function.

    Returns:
      NamedShardings, for ``jax.jit(..., out_shardings=...)`` or ``jax.device_put``.

    Raises:
      ValueError: A pattern matches no leaf, no rule matches a leaf, or a spec does not divide a
        leaf evenly.

    Examples:
      >>> import functrain as ft, jax, jax.numpy as jnp, optax
      >>> from jax.sharding import AbstractMesh
      >>> params = {"kernel": jnp.zeros((256, 512)), "bias": jnp.zeros(512)}
      >>> state = ft.TrainState.create(params=params, tx=optax.adam(1e-3))
      >>> result = shardings(state, AbstractMesh((8,), ("data",)), ft.sharding.fsdp())
      >>> tuple(result.opt_state[0].mu["kernel"].spec), tuple(result.opt_state[0].count.spec)
      ((None, 'data'), ())
    """
    paths: list[str] = []

    # A rule gets the shape and dtype of a leaf, never its values.
    def by_rule(path: str, x: Any) -> NamedSharding:
        paths.append(path)
        spec = rule(path, jax.ShapeDtypeStruct(x.shape, x.dtype), mesh)
        require_fitting_spec(path, x, spec, mesh)
        return NamedSharding(mesh, spec)

    def shard_part(part: PyTree) -> PyTree:
        is_state = _is_state(part)
        return _shard_state(part, by_rule, mesh) if is_state else _shard_tree(part, by_rule)

    has_states = any(map(_is_state, jax.tree.leaves(state, is_leaf=_is_state)))
    # In a tree without states the paths begin at its root, so its leaves are not parts.
    result = jax.tree.map(shard_part, state, is_leaf=_is_state) if has_states else shard_part(state)
    # Only `rules` has this check; a rule may be any function.
    getattr(rule, "require_use", lambda paths: None)(paths)
    return result


def create(make: Callable[[], PyTree], mesh: Mesh, rule: Rule) -> PyTree:
    """Creates a state directly on the devices of a mesh: no device ever holds all of it.

    Args:
      make: Returns the state; it is traced. The values are the same as without a mesh.
      mesh: A mesh from `mesh`, or from jax.
      rule: As for `shardings`.

    Returns:
      The state, divided over the mesh.

    Examples:
      >>> import functrain as ft, jax, jax.numpy as jnp, optax
      >>> def make():
      ...     params = {"kernel": jax.random.normal(jax.random.key(0), (256, 512))}
      ...     return ft.TrainState.create(params=params, tx=optax.adam(1e-3))
      >>> state = create(make, ft.sharding.mesh({"data": -1}), ft.sharding.fsdp())
      >>> tuple(state.params["kernel"].sharding.spec)
      (None, 'data')
    """
    return jit(make, out_shardings=shardings(jax.eval_shape(make), mesh, rule))()


def put(state: PyTree, mesh: Mesh, rule: Rule) -> PyTree:
    """Copies an existing state to the devices of a mesh, such as the state of a Keras model.

    Args:
      state: As for `shardings`; its arrays stay alive.
      mesh: A mesh from `mesh`, or from jax.
      rule: As for `shardings`.

    Returns:
      The state, divided over the mesh.

    Examples:
      >>> import functrain as ft, jax.numpy as jnp
      >>> mesh = ft.sharding.mesh({"data": -1})
      >>> state = put({"kernel": jnp.zeros((256, 512))}, mesh, ft.sharding.fsdp())
      >>> tuple(state["kernel"].sharding.spec)
      (None, 'data')
    """
    # The copy of a Python number is an array, which has a shape.
    state = _tree.copy(state)
    return jax.tree.map(_tree.device_put, state, shardings(state, mesh, rule))


def _is_state(x: Any) -> bool:
    # By its attributes, so that other classes of states are recognized too.
    return all(hasattr(x, part) for part in ("params", "model_state", "opt_state", "replace"))


def _shard_tree(tree: PyTree, choose: Callable[[str, Any], NamedSharding]) -> PyTree:
    return jax.tree_util.tree_map_with_path(lambda path, x: choose(_tree.path_str(path), x), tree)


def _shard_state(
    state: Any, by_rule: Callable[[str, Any], NamedSharding], mesh: Mesh | AbstractMesh
) -> Any:
    replicate = NamedSharding(mesh, PartitionSpec())
    params = _shard_tree(state.params, by_rule)
    keys = [(path, x.shape) for path, x in _tree.leaves_with_path(state.params)]
    param_shardings: dict[Any, NamedSharding] = dict(
        zip(keys, jax.tree.leaves(params), strict=True)
    )

    # Not by `optax.tree.map_params`: with shardings it fails for multi_transform, masked, muon and
    # lbfgs. Paths and shapes worked for all 13 optimizers that were tried.
    def follow_param(path: str, x: Any) -> NamedSharding:
        """Returns the sharding of the param that the path ends with, if it has the same shape."""
        parts = path.split("/")
        # A single array as params has no path of its own.
        for end in [*("/".join(parts[i:]) for i in range(len(parts))), "(root)"]:
            if (end, x.shape) in param_shardings:
                return param_shardings[end, x.shape]
            # A stack of values like the param, such as the history of lbfgs.
            item_sharding = param_shardings.get((end, x.shape[1:])) if x.ndim else None
            if item_sharding is not None and item_sharding.spec:
                return NamedSharding(mesh, PartitionSpec(None, *item_sharding.spec))
        return replicate

    # Fields that a subclass adds, such as averages of the params, follow these as well.
    return _shard_tree(state, follow_param).replace(
        params=params, model_state=_shard_tree(state.model_state, by_rule)
    )
