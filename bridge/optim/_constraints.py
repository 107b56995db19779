"""A Keras model's constraints as an optax transformation."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import keras
import optax

from bridge.model import _variables
from functrain.internal import PyTree, require
from functrain.internal import tree as _tree


class ConstraintState(NamedTuple):
    """The state of `constraints`, without leaves. `applies_constraints` looks for it."""


def constraints(model: keras.Layer) -> optax.GradientTransformation:
    """Returns a transformation that applies the constraints of a model's variables.

    It must come last in a chain: ``optax.chain(optax.adam(1e-3), bridge.constraints(model))``. Its
    updates result in the params ``constraint(params + updates)``, as in Keras, up to a rounding
    error.

    Args:
      model: The model from which `bridge.create_state` took the params.

    Returns:
      A transformation without state, whose `update` needs params.

    Raises:
      ValueError: (from `update`) params are missing, or do not belong to the model.

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
        expected = "params, as in tx.update(grads, state, params)"
        require(params is not None, "bridge.constraints", expected, params)
        # The variables are looked up in every trace, since layers may have been frozen since.
        layout = _variables.layout_of_state(model, params)
        variables = _variables.select_present(layout.params, params, "params")

        def constrain(path: Any, param: jax.Array, update: jax.Array) -> jax.Array:
            constraint = variables[_tree.keys(path)].constraint
            if constraint is None:
                return update
            # Keras assigns constrained params. An optax update must be a difference.
            return update_to(jnp.asarray(constraint(param + update), param.dtype), param)

        return jax.tree_util.tree_map_with_path(constrain, params, updates), state

    return optax.GradientTransformation(lambda params: ConstraintState(), update)


def applies_constraints(opt_state: PyTree) -> bool:
    """Returns True if the transformation with this state applies a model's constraints."""
    return bool(_tree.nodes(opt_state, ConstraintState))


def update_to(new: jax.Array, old: jax.Array) -> jax.Array:
    """Returns the update with which `optax.apply_updates` turns `old` into `new`.

    ``old + update`` equals `new` to the bit unless no float does that: if a parameter changes its
    sign or shrinks by more than half, ``old + update`` has no bits finer than those of `old`.
    """
    update = new - old
    # The difference is rounded if its exponent is above those of both values. The remaining error
    # is added once more.
    error = new - (old + update)
    return update + jnp.where(jnp.isfinite(error), error, jnp.zeros_like(error))
