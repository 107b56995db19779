"""Models that recompute activations in the backward pass instead of storing them."""

import functools
from collections.abc import Callable
from typing import Any

import jax

from functrain.common._types import PyTree
from functrain.model._model import Model, ModelOutput, require_model


def remat(model: Model, policy: Callable[..., Any] | None = None) -> Model:
    """Returns the model that, in training, stores fewer activations and recomputes the others.

    It applies `jax.checkpoint` to the whole model, in training only.

    Args:
      model: The model. The masks that a Keras model attaches to its outputs are lost.
      policy: Selects the values that are stored, one of `jax.checkpoint_policies`.
        ``dots_saveable`` stores matrix products and recomputes activations, norms and dropout,
        which costs little. None stores the inputs only: the whole forward pass runs again before
        the backward pass, which then needs as much memory as without `remat`. That saves memory
        only where the loss itself needs much. `flax.linen.remat` and `keras.RematScope` work layer
        by layer and save more.

    Raises:
      TypeError: `model` is not a Model.

    Examples:
      >>> import flax.linen as nn, jax, jax.numpy as jnp
      >>> from functrain import from_linen
      >>> model = remat(from_linen(nn.Dense(2)), jax.checkpoint_policies.dots_saveable)
      >>> params, model_state = model.init(jax.random.key(0), jnp.ones((1, 3)))
      >>> model.apply(params, model_state, jnp.ones((1, 3)), training=True).outputs.shape
      (1, 2)
    """
    require_model(model)

    def apply(*arrays: PyTree, training: bool = False, **rng: Any) -> ModelOutput:
        # `training` is bound first: `jax.checkpoint` would trace it like an array.
        run: Callable[..., ModelOutput] = functools.partial(model.apply, training=training)
        # Without training there is no backward pass, and nothing to recompute.
        if training:
            run = jax.checkpoint(run, policy=policy)
        return run(*arrays, **rng)

    return Model(model.init, apply)
