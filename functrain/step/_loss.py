"""Losses as pure functions of a state's parts."""

from collections.abc import Mapping
from typing import Any, NamedTuple, Protocol

import jax

from functrain.common._types import PyTree


class Aux(NamedTuple):
    """What a loss returns beside its value.

    Attributes:
      model_state: The model state after the forward pass; same structure as the one given.
      outputs: The model's outputs, for metrics. None if there is nothing to show.
      logs: Scalars to report beside the loss, under their names.
      weight: `f32[]`, what the mean over examples was divided by, where that is not their number:
        the sum of their weights. Means over batches, in evaluation, in the history and in
        `micro_batches`, are weighted by it; training logs it as ``sum_of_weights``. ``()`` where
        the loss is no such mean, as a sum is; `micro_batches` refuses it then.

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

    # Any signature that takes these, however it spells them.
    def __call__(self, *args: Any, **kwargs: Any) -> tuple[jax.Array, Aux]:
        """Returns the loss of one batch."""
        ...
