"""The shardings of a whole state, from those of its params."""

from collections.abc import Callable
from typing import Any

import jax
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec

from functrain.common import _tree
from functrain.common._compile import jit
from functrain.common._types import PyTree
from functrain.sharding._rules import Rule, require_fitting_spec


def shardings(state: PyTree, mesh: Mesh | AbstractMesh, rule: Rule) -> PyTree:
    """Returns where each leaf of a state is to lie, in the structure of the state.

    The rule is asked about params and model_state. What an optimizer keeps for a parameter
    follows it, found by the end of its path and by its shape, whatever the optimizer: moments,
    averages, accumulated gradients, stacks of those. All else, as counts and factored moments, is
    on all devices.

    Args:
      state: A `TrainState`, or any pytree that holds some; concrete, or abstract as from
        ``jax.eval_shape``. A pytree that holds none counts as params.
      mesh: From `mesh`, or from jax.
      rule: How a leaf is divided: `rules`, `fsdp`, `replicated`, or a function.

    Returns:
      NamedShardings, for ``jax.jit(..., out_shardings=...)`` or ``jax.device_put``.

    Raises:
      ValueError: A rule's pattern fits no leaf, no rule fits a leaf, or a spec does not divide it.

    Examples:
      >>> import functrain as ft, jax, jax.numpy as jnp, optax
      >>> from jax.sharding import AbstractMesh
      >>> params = {"kernel": jnp.zeros((256, 512)), "bias": jnp.zeros(512)}
      >>> state = ft.TrainState.create(params=params, tx=optax.adam(1e-3))
      >>> found = shardings(state, AbstractMesh((8,), ("data",)), ft.sharding.fsdp())
      >>> tuple(found.opt_state[0].mu["kernel"].spec), tuple(found.opt_state[0].count.spec)
      ((None, 'data'), ())
    """
    paths: list[str] = []

    def by_rule(path: str, x: Any) -> NamedSharding:
        paths.append(path)
        spec = rule(path, jax.ShapeDtypeStruct(x.shape, x.dtype), mesh)
        require_fitting_spec(path, x, spec, mesh)
        return NamedSharding(mesh, spec)

    def of_part(part: PyTree) -> PyTree:
        is_state = _is_state(part)
        return _of_state(part, by_rule, mesh) if is_state else _of_tree(part, by_rule)

    has_states = any(map(_is_state, jax.tree.leaves(state, is_leaf=_is_state)))
    # The paths of a tree without states are those from its root.
    result = jax.tree.map(of_part, state, is_leaf=_is_state) if has_states else of_part(state)
    getattr(rule, "require_use", lambda paths: None)(paths)
    return result


def create(make: Callable[[], PyTree], mesh: Mesh, rule: Rule) -> PyTree:
    """Makes a state in its places: at no time it is whole on one device.

    Args:
      make: Makes the state; traced. The same values come out as without a mesh.
      mesh: From `mesh`, or from jax.
      rule: As for `shardings`.

    Returns:
      What `make` returns, divided.

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
    """Copies a state that is there to its places, as one that came of a Keras model.

    Args:
      state: As for `shardings`; its arrays stay alive.
      mesh: From `mesh`, or from jax.
      rule: As for `shardings`.

    Returns:
      The state, divided.

    Examples:
      >>> import functrain as ft, jax.numpy as jnp
      >>> mesh = ft.sharding.mesh({"data": -1})
      >>> state = put({"kernel": jnp.zeros((256, 512))}, mesh, ft.sharding.fsdp())
      >>> tuple(state["kernel"].sharding.spec)
      (None, 'data')
    """
    return jax.tree.map(_tree.device_put, _tree.copy(state), shardings(state, mesh, rule))


def _is_state(x: Any) -> bool:
    return all(hasattr(x, part) for part in ("params", "model_state", "opt_state", "replace"))


def _of_tree(tree: PyTree, choose: Callable[[str, Any], NamedSharding]) -> PyTree:
    return jax.tree_util.tree_map_with_path(lambda path, x: choose(_tree.path_str(path), x), tree)


def _of_state(
    state: Any, by_rule: Callable[[str, Any], NamedSharding], mesh: Mesh | AbstractMesh
) -> Any:
    everywhere = NamedSharding(mesh, PartitionSpec())
    params = _of_tree(state.params, by_rule)
    shapes = [(path, x.shape) for path, x in _tree.leaves_with_path(state.params)]
    of_param: dict[Any, NamedSharding] = dict(zip(shapes, jax.tree.leaves(params), strict=True))

    def follow(path: str, x: Any) -> NamedSharding:
        """Returns the sharding of the param that the path ends with, if it has the same shape."""
        parts = path.split("/")
        for end in [*("/".join(parts[i:]) for i in range(len(parts))), "(root)"]:
            if (end, x.shape) in of_param:
                return of_param[end, x.shape]
            stacked = of_param.get((end, x.shape[1:])) if x.ndim else None
            if stacked is not None and stacked.spec:
                return NamedSharding(mesh, PartitionSpec(None, *stacked.spec))
        return everywhere

    rest = jax.tree.map(lambda x: everywhere, state)
    return rest.replace(
        params=params,
        model_state=_of_tree(state.model_state, by_rule),
        opt_state=_of_tree(state.opt_state, follow),
    )
