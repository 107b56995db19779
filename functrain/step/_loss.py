"""Losses as pure functions of the parts of a state."""

import dataclasses
from collections.abc import Mapping
from typing import Any, Protocol

import flax.struct
import jax

from functrain.common._types import PyTree


class Aux(flax.struct.PyTreeNode, eq=False):
    """The values that a loss returns beside the loss itself.

    A loss of a model without a changing model state may return a plain dict of logs in its place.
    A warning tells if that drops a new model state.

    Attributes:
      model_state: The model state after the forward pass, with the structure it had before.
      outputs: The model's outputs, for metrics. None if there are none.
      logs: Scalars to report beside the loss, by name.
      weight: `f32[]`, the divisor of the mean over examples, if it is not their number: the sum of
        their weights. Means over batches, in evaluation, in the history and in `micro_batches`,
        are weighted by it. Training logs it as ``sum_of_weights``, a name whose type tells it from
        a log of yours. Use ``()`` if the loss is not a mean, for example a sum; `micro_batches`
        then raises an error.
      labels: The labels, for metrics that compare them with the outputs. With None, these metrics
        take the second part of a batch that is a tuple.
      sample_weight: `f32[B]` or `f32[B, ...]`, the weights of the examples, or a mask, with which
        the loss was computed. Metrics use the same ones. None if all examples count alike.

    Examples:
      >>> Aux(model_state={}).logs
      {}
    """

    model_state: PyTree = ()
    outputs: PyTree = None
    logs: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    weight: jax.Array | tuple[()] | None = None
    labels: PyTree = None
    sample_weight: jax.Array | None = None


class LossFn(Protocol):
    """``(params, model_state, batch, *, rng, training) -> (loss f32[], Aux)``, pure.

    A dict of logs may take the place of the `Aux`, if the model state does not change.

    Examples:
      >>> import jax.numpy as jnp
      >>> def loss_fn(params, model_state, batch, *, rng, training):
      ...     x, y = batch
      ...     outputs = x @ params["w"]
      ...     return jnp.mean((outputs - y) ** 2), Aux(model_state, outputs)
    """

    # `Any`, so that type checkers accept every spelling of these parameters, such as `*batch` or
    # `**mode`.
    def __call__(self, *args: Any, **kwargs: Any) -> tuple[jax.Array, Aux | Mapping[str, Any]]:
        """Returns the loss of one batch."""
        ...
