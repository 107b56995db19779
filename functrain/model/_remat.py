"""Models that compute again what they do not keep."""

import functools
from collections.abc import Callable
from typing import Any

import jax

from functrain.common._types import PyTree
from functrain.model._model import Model, ModelOutput


def remat(model: Model, policy: Callable[..., Any] | None = None) -> Model:
    """Returns the model that in training keeps less for the gradient, and computes it again.

    It is `jax.checkpoint` around the application, in training only.

    Args:
      model: The model. (The masks that a Keras model leaves on its outputs do not come through.)
      policy: One of `jax.checkpoint_policies`: what is kept. ``dots_saveable`` keeps products of
        matrices, and computes activations, norms and dropout again, which costs little. None keeps
        the inputs only: all of the forward pass runs again before the gradient, and then memory
        holds what it holds without. It pays where the loss itself needs much; layer by layer,
        `flax.linen.remat` and `keras.RematScope` save more.

    Examples:
      >>> import flax.linen as nn, jax, jax.numpy as jnp
      >>> from functrain import from_linen
      >>> model = remat(from_linen(nn.Dense(2)), jax.checkpoint_policies.dots_saveable)
      >>> params, model_state = model.init(jax.random.key(0), jnp.ones((1, 3)))
      >>> model.apply(params, model_state, jnp.ones((1, 3)), training=True).outputs.shape
      (1, 2)
    """

    def apply(*arrays: PyTree, training: bool = False, **rng: Any) -> ModelOutput:
        run: Callable[..., ModelOutput] = functools.partial(model.apply, training=training)
        run = jax.checkpoint(run, policy=policy) if training else run
        return run(*arrays, **rng)

    return Model(model.init, apply)
