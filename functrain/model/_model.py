"""A model as a pair of pure functions, in the style of optax optimizers."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax

from functrain.common._checks import require_instance
from functrain.common._types import PyTree


class ModelOutput(NamedTuple):
    """The result of one application of a model.

    Attributes:
      outputs: The predictions, any pytree, leaves usually `f32[B, ...]`.
      model_state: The non-trainable collections after this application, with updated batch
        statistics and seed counters. It has the structure, shapes and dtypes of the `model_state`
        that was passed to `apply`.
      losses: The scalar losses that the model itself computes, each `f32[]` (regularizers,
        `add_loss`, a flax `losses` collection). They are not part of `outputs`; `supervised` adds
        them to the loss.

    Examples:
      >>> import jax.numpy as jnp
      >>> outputs, model_state, losses = ModelOutput(jnp.ones((2, 3)), {}, ())
      >>> outputs.shape
      (2, 3)
    """

    outputs: PyTree
    model_state: PyTree
    losses: tuple[jax.Array, ...] = ()


class Model(NamedTuple):
    """A pair of pure functions.

    Attributes:
      init: ``init(key, inputs) -> (params, model_state)``. `inputs` is one pytree: a model with
        two inputs takes a tuple or a dict.
      apply: ``apply(params, model_state, inputs, *, rng=None, training=False) -> ModelOutput``. A
        function that wraps another model's `apply` takes `rng` and `training` as ``**mode``.
        `rng` is a typed key `key[]` for dropout and other randomness, or None for a model that
        is deterministic or keeps its own seed counters in `model_state`.

    Examples:
      A model without any framework:

      >>> import jax, jax.numpy as jnp
      >>> def init(key, inputs):
      ...     return {"w": jax.random.normal(key, (inputs.shape[-1], 2))}, {}
      >>> def apply(params, model_state, inputs, *, rng=None, training=False):
      ...     return ModelOutput(inputs @ params["w"], model_state)
      >>> model = Model(init, apply)
      >>> params, model_state = model.init(jax.random.key(0), jnp.ones((4, 3)))
      >>> model.apply(params, model_state, jnp.ones((4, 3))).outputs.shape
      (4, 2)
    """

    init: Callable[[jax.Array, PyTree], tuple[PyTree, PyTree]]
    apply: Callable[..., ModelOutput]


def require_model(model: Any) -> None:
    """Raises TypeError unless an argument is a Model."""
    advice = (
        "Make one with bridge.from_keras, functrain.from_linen, functrain.from_nnx, "
        "functrain.from_equinox or functrain.Model(init, apply)."
    )
    require_instance("model", model, Model, "a functrain.Model", advice)
