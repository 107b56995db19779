"""Losses as pure functions of the parts of a state."""

from collections.abc import Mapping
from typing import Any, NamedTuple, Protocol

import jax

from functrain.common._types import PyTree


class Aux(NamedTuple):
    """The values that a loss returns beside the loss itself.

    Attributes:
      model_state: The model state after the forward pass, with the structure it had before.
      outputs: The model's outputs, for metrics. None if there are none.
      logs: Scalars to report beside the loss, by name.
      weight: `f32[]`, the divisor of the mean over examples, if it is not their number: the sum of
        their weights. Means over batches, in evaluation, in the history and in `micro_batches`,
        are weighted by it. Training logs it as ``sum_of_weights``. Use ``()`` if the loss is not
        a mean, for example a sum; `micro_batches` then raises an error.

    Examples:
      >>> Aux(model_state={}).logs
      {}
    """

    model_state: PyTree = ()
    outputs: PyTree = None
    logs: Mapping[str, Any] = {}
    weight: jax.Array | tuple[()] | None = None


class LossFn(Protocol):
    """``(params, model_state, batch, *, rng, training) -> (loss f32[], Aux)``, pure.

    Examples:
      >>> import jax.numpy as jnp
      >>> def loss_fn(params, model_state, batch, *, rng, training):
      ...     x, y = batch
      ...     outputs = x @ params["w"]
      ...     return jnp.mean((outputs - y) ** 2), Aux(model_state, outputs)
    """

    # `Any`, so that type checkers accept every spelling of these parameters, such as `*batch` or
    # `**mode`.
    def __call__(self, *args: Any, **kwargs: Any) -> tuple[jax.Array, Aux]:
        """Returns the loss of one batch."""
        ...
