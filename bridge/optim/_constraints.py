"""A Keras model's constraints, kept by an optax transformation."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import keras
import optax

from bridge.model import _variables
from functrain.internal import PyTree
from functrain.internal import tree as _tree


class ConstraintState(NamedTuple):
    """Marks, without a leaf, a transformation that keeps a model's constraints."""


def constraints(model: keras.Layer) -> optax.GradientTransformation:
    """Returns the transformation that ends updates within the constraints of a model's variables.

    It comes last in a chain: ``optax.chain(optax.adam(1e-3), bridge.constraints(model))``. Its
    updates lead to ``constraint(params + updates)``, as Keras's optimizers do, up to a rounding.

    Args:
      model: The model that `bridge.create_state` made the params of.

    Returns:
      A transformation without a state, whose `update` needs params.

    Raises:
      ValueError: (from `update`) params are missing, or are not those of the model.

    Examples:
      >>> import bridge, jax, keras, optax
      >>> layer = keras.layers.Dense(2, kernel_constraint="non_neg", name="out")
      >>> model = keras.Sequential([keras.Input((3,)), layer])
      >>> tx = optax.chain(optax.sgd(1.0), constraints(model))
      >>> state = bridge.create_state(model, tx)
      >>> state = state.apply_gradients(jax.tree.map(lambda p: p + 1.0, state.params), tx)
      >>> print(state.params["out"]["kernel"][0], state.params["out"]["bias"])
      [0. 0.] [-1. -1.]
    """

    def update(
        updates: PyTree, state: ConstraintState, params: PyTree = None
    ) -> tuple[PyTree, ConstraintState]:
        if params is None:
            raise ValueError("bridge.constraints: update needs the params: tx.update(g, s, params)")
        held = _variables.fitting(_variables.layout(model).params, params, "params")

        def constrained(path: Any, param: jax.Array, update: jax.Array) -> jax.Array:
            constraint = held[_tree.keys(path)].constraint
            if constraint is None:
                return update
            return difference(jnp.asarray(constraint(param + update), param.dtype), param)

        return jax.tree_util.tree_map_with_path(constrained, params, updates), state

    return optax.GradientTransformation(lambda params: ConstraintState(), update)


def keeps_constraints(opt_state: PyTree) -> bool:
    """Whether a transformation with this state keeps a model's constraints."""
    return bool(_tree.nodes(opt_state, ConstraintState))


def difference(new: jax.Array, old: jax.Array) -> jax.Array:
    """Returns what `optax.apply_updates` adds to `old` to get `new`, as far as it can.

    The plain difference misses `new` by a rounding whenever its exponent is above that of both.
    Adding what is missing hits it, unless no float does: where a parameter changes its sign or
    shrinks by more than half, ``old + update`` has no bits finer than those of `old`.
    """
    update = new - old
    missing = new - (old + update)
    return update + jnp.where(jnp.isfinite(missing), missing, jnp.zeros_like(missing))
