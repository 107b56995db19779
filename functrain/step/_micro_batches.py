"""Gradients of large batches in little memory, accumulated over micro-batches."""

import dataclasses
from collections.abc import Callable
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
from jax.custom_derivatives import SymbolicZero

from functrain.common import _tree
from functrain.common._checks import require, require_integer, require_no_problems
from functrain.common._types import PyTree
from functrain.model._split import join, split_scales
from functrain.step._check import check_loss
from functrain.step._loss import Aux, LossFn
from functrain.step._update import compute_loss, scaled
from functrain.tx._guards import unscale_gradients

LossAndAux: TypeAlias = tuple[jax.Array, Aux]


def micro_batches(loss_fn: LossFn, size: int) -> LossFn:
    """Returns the loss of a large batch, computed on a few examples at a time.

    The gradient equals that of the large batch up to rounding: ``sum(w_i * g_i) / sum(w_i)`` over
    the micro-batches, also with weighted examples and a smaller last micro-batch. It is computed
    together with the loss: no forward pass runs twice, and memory holds the activations of one
    micro-batch. The result is a loss like any other, for `train_step`, `update`, `eval_step` and
    `jax.grad`.

    If all weights of a batch that is split are zero, so are its loss and its gradient, including
    those of penalties that `supervised` adds.

    Operations over the batch see one micro-batch: batch statistics are carried from one
    micro-batch to the next, and random numbers are drawn from ``fold_in(rng, i)``. Float8 scales
    stay the same during the batch; each new one is the largest that a micro-batch returns, as when
    a Keras optimizer accumulates gradients.

    `functrain.tx.loss_scale` scales the loss of each micro-batch, if `train_step` or `update` gets
    this loss itself: a function around it hides that it is split.

    Args:
      loss_fn: The loss, a mean over examples. If its divisor is not their number, the loss returns
        the divisor in ``Aux.weight``, as `supervised` does for ``reduction="weighted_mean"`` and
        for the masks and weights of `bridge.loss`.
      size: Examples in a micro-batch. All arguments after `model_state` are split along their
        first axis, except for numbers; the loss closes over arrays that must not be split. Of n
        micro-batches, the i-th has every n-th example from i on, and so lies on as many devices as
        the batch. The remaining examples form a smaller last micro-batch. Batches of up to `size`
        examples are not split.

    Returns:
      The loss, with an Aux of all examples: `outputs` are concatenated, `logs` are weighted means.
      Sums are computed in float32 or wider. It can be differentiated with respect to params.

    Raises:
      ValueError: `size` is below 1. (When traced) the arguments, or the outputs, do not share
        their first axis, or the loss reports that it is not a mean.
      TypeError: (when traced) it is differentiated with respect to something other than params.

    Examples:
      >>> import jax, jax.numpy as jnp
      >>> def loss_fn(params, model_state, x, *, rng, training):
      ...     return jnp.mean(params * x), Aux(model_state)
      >>> whole = micro_batches(loss_fn, size=2)
      >>> grad = jax.grad(lambda p: whole(p, {}, jnp.arange(5.0), rng=None, training=True)[0])
      >>> print(grad(1.0))
      2.0
    """
    check_loss(loss_fn)
    require_integer("size", size)
    return _BatchLoss(loss_fn, size)


@dataclasses.dataclass(frozen=True, eq=False)
class _BatchLoss:
    """The loss of a large batch; see `micro_batches`.

    Attributes:
      loss_fn: The loss of a micro-batch.
      size: Examples in a micro-batch.
      scale: The factor of a micro-batch's loss while it is differentiated, or None. It changes
        neither the loss nor the gradient, except that small float16 gradients do not underflow.
    """

    loss_fn: LossFn
    size: int
    scale: jax.Array | None = None

    def with_scale(self, scale: jax.Array | None) -> LossFn:
        """Returns this loss with another scale, for `update`."""
        return dataclasses.replace(self, scale=scale)

    def __call__(
        self, params: PyTree, model_state: PyTree, /, *args: PyTree, rng: Any, training: bool
    ) -> LossAndAux:
        """Returns the loss and the Aux of all examples."""
        mode = {"rng": rng, "training": training}
        # Without a scan, a small batch costs no more than with `loss_fn`.
        if _example_count(args) <= self.size:
            return compute_loss(self.loss_fn, params, model_state, *args, **mode)

        def loss_of_part(
            trained: PyTree, model_state: PyTree, rng: Any, args: PyTree
        ) -> LossAndAux:
            params, scales = trained
            model_state, mode = join(scales, model_state), {"rng": rng, "training": training}
            loss, aux = compute_loss(self.loss_fn, params, model_state, *args, **mode)
            return loss, aux.replace(model_state=split_scales(aux.model_state)[1])

        scales, rest = split_scales(model_state)
        total_loss = _accumulate(loss_of_part, self.size)
        loss, aux = total_loss((params, scales), rest, rng, args, self.scale)
        return loss, aux.replace(model_state=join(scales, aux.model_state))


def _accumulate(loss_of_part: Callable[..., LossAndAux], size: int) -> Callable[..., LossAndAux]:
    """Returns ``(trained, model_state, rng, args, scale) -> (loss, Aux)`` over all micro-batches.

    `trained` is the pair of the params and the float8 scales, which have gradients too.

    Differentiating a scan would keep the activations of every micro-batch. This custom derivative
    computes the gradients inside the scan and adds them up there.
    """

    @jax.custom_vjp
    def total_loss(*primals: PyTree) -> LossAndAux:
        def value(*part: PyTree) -> Any:
            return ((), loss_of_part(*part)), ()

        return _scan_parts(value, size, *primals[:-1])[0]

    def forward(*primals: PyTree) -> tuple[LossAndAux, PyTree]:
        if any(x.perturbed for x in jax.tree.leaves(primals[1:], is_leaf=_is_primal)):
            raise TypeError(_PARAMS_ONLY.format("model_state, the batch or rng"))
        *primals, scale = jax.tree.map(lambda x: x.value, primals, is_leaf=_is_primal)
        value_and_grad = jax.value_and_grad(scaled(loss_of_part, scale), has_aux=True)
        loss_and_aux, (grads, new_scales) = _scan_parts(value_and_grad, size, *primals)
        params, _ = primals[0]
        grads = jax.tree.map(lambda g, w: g.astype(w.dtype), grads, params)
        return loss_and_aux, (grads, new_scales, scale)

    def backward(residuals: PyTree, cotangents: tuple[Any, Any]) -> tuple[PyTree, ...]:
        grads, new_scales, scale = residuals
        loss_cotangent, aux_cotangents = cotangents
        if not all(isinstance(x, SymbolicZero) for x in jax.tree.leaves(aux_cotangents)):
            raise TypeError(_PARAMS_ONLY.format("Aux"))
        if isinstance(loss_cotangent, SymbolicZero):
            return jax.tree.map(jnp.zeros_like, (grads, new_scales)), None, None, None, None
        # `grads` are those of the scaled loss. `update` scales as well, so its factor is 1.
        factor = unscale_gradients(loss_cotangent, scale)
        grads = jax.tree.map(lambda g: (g * factor).astype(g.dtype), grads)
        return (grads, new_scales), None, None, None, None

    # Symbolic zeros show which inputs and outputs are differentiated: only the gradient of the loss
    # with respect to params is known, and any other would silently be zero.
    total_loss.defvjp(forward, backward, symbolic_zeros=True)
    return total_loss


_PARAMS_ONLY = (
    "micro_batches: expected the gradient of the loss with respect to params, the only one that it "
    "computes, got one that goes through {}. Differentiate loss_fn itself."
)


def _is_primal(x: Any) -> bool:
    return hasattr(x, "perturbed")


def _scan_parts(
    value_and_grad: Callable[..., Any],
    size: int,
    trained: PyTree,
    model_state: PyTree,
    rng: Any,
    args: PyTree,
) -> tuple[LossAndAux, PyTree]:
    """Runs the micro-batches one after the other; returns the loss, the Aux and the gradients.

    Args:
      value_and_grad: ``(trained, model_state, rng, args) -> ((..., (loss, Aux)), gradients or ())``
        for one micro-batch.
      size: Examples in a micro-batch.
      trained: The params and the float8 scales.
      model_state: The model state before the batch, without the scales.
      rng: A key, or None.
      args: The batch.
    """

    def measure(model_state: PyTree, i: Any, args: PyTree) -> tuple[PyTree, PyTree, Aux]:
        """Returns the terms of the sums, the new float8 scales, and the Aux of a micro-batch."""
        # One key for all micro-batches would drop the same units in each of them.
        key = None if rng is None else jax.random.fold_in(rng, i)
        (_, (loss, aux)), grads = value_and_grad(trained, model_state, key, args)
        params_grads, scales = grads or ((), ())
        count = _example_count(args) if aux.weight is None else aux.weight
        is_mean = not isinstance(aux.weight, tuple)
        expected = "a loss that is one mean over examples, and neither a sum nor several means"
        advice = "Use a mean, or smaller batches with optax.MultiSteps."
        require(is_mean, "micro_batches", expected, aux.weight, advice)
        return _times_weight(count, (loss, aux.logs, params_grads)), scales, aux

    def step(carry: tuple[PyTree, PyTree, PyTree], part: tuple[Any, PyTree]) -> Any:
        model_state, sums, largest_scales = carry
        terms, scales, aux = measure(model_state, *part)
        sums = jax.tree.map(jnp.add, sums, terms)
        largest_scales = jax.tree.map(jnp.maximum, largest_scales, scales)
        return (aux.model_state, sums, largest_scales), _by_example(aux)

    count = _example_count(args)
    full_parts = count // size
    divisible = args if count % size == 0 else _slice(args, slice(full_parts * size))
    parts = jax.tree.map(lambda x: _split(x, full_parts), divisible)
    # The shapes of one micro-batch, for the zeros that the scan begins with.
    first_part = jax.tree.map(lambda x: x[0], parts)
    sums, scales, aux = jax.eval_shape(measure, model_state, 0, first_part)
    wrong = _tree.format_leaves(_by_example(aux), lambda x: x.shape[:1] != (size,))
    expected = f"outputs whose first axis is that of a micro-batch, {size}"
    require_no_problems("micro_batches", wrong, expected, "Return scalars in Aux(logs=...).")
    zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), (sums, scales))
    carry, rows = jax.lax.scan(step, (model_state, *zeros), (jnp.arange(full_parts), parts))
    rows = jax.tree.map(_join, rows)
    # A scan takes parts of one size only, so the smaller last one follows it.
    if count % size:
        remainder = _slice(args, slice(full_parts * size, None))
        carry, last_rows = step(carry, (full_parts, remainder))
        rows = jax.tree.map(lambda a, b: jnp.concatenate([a, b]), rows, last_rows)
    model_state, (weight, sums), new_scales = carry
    # A batch of zero weights has no loss. Unlike that of `supervised`, it has no penalties, either.
    divisor = jnp.where(weight == 0, jnp.ones_like(weight), weight)
    loss, logs, grads = jax.tree.map(lambda x: x / divisor.astype(x.dtype), sums)
    weight = None if aux.weight is None else weight
    return (loss, Aux(model_state, logs=logs, weight=weight, **rows)), (grads, new_scales)


def _by_example(aux: Aux) -> dict[str, PyTree]:
    """Returns the fields of an Aux that have a row for each example."""
    return {name: getattr(aux, name) for name in ("outputs", "labels", "sample_weight")}


def _times_weight(weight: Any, values: PyTree) -> tuple[jax.Array, PyTree]:
    """Returns a weight, f32[], and values times it: the terms of a weighted mean."""
    weight = jnp.asarray(weight, jnp.float32)

    def multiply(x: Any) -> Any:
        # Sums of many micro-batches lose bits in half precision.
        x = _tree.at_least_float32(jnp.asarray(x))
        # A mean of no examples is NaN, which its weight of 0 does not remove.
        return jnp.where(weight == 0, 0, x * weight.astype(x.dtype))

    return weight, jax.tree.map(multiply, values)


def _split(x: jax.Array, parts: int) -> jax.Array:
    """Returns `[parts, size, ...]`: the i-th part has every n-th example from i on.

    A number is in each part.

    Consecutive examples lie on one device of a sharded batch. A part of consecutive examples would
    leave the other devices idle.
    """
    if _is_number(x):
        return jnp.broadcast_to(x, (parts,))
    return x.reshape(x.shape[0] // parts, parts, *x.shape[1:]).swapaxes(0, 1)


def _join(x: jax.Array) -> jax.Array:
    """Returns `[examples, ...]` in the order that they had before `_split`."""
    return x.swapaxes(0, 1).reshape(x.shape[0] * x.shape[1], *x.shape[2:])


def _slice(args: PyTree, rows: slice) -> PyTree:
    return jax.tree.map(lambda x: x if _is_number(x) else x[rows], args)


def _is_number(x: Any) -> bool:
    """Returns True for a scalar. A key is none: all micro-batches would draw the same numbers."""
    return jnp.ndim(x) == 0 and not _tree.is_key(x)


def _example_count(args: PyTree) -> int:
    """Returns the size of the first axis; raises ValueError unless all but numbers share it."""
    sizes = {jnp.shape(x)[:1] for x in jax.tree.leaves(args) if not _is_number(x)}
    if len(sizes) != 1 or () in sizes:
        got = _tree.format_leaves(args) or "  no arrays"
        expected = "arrays that share their first axis, that of the examples"
        advice = "Let the loss close over arrays that must not be split."
        require_no_problems("micro_batches", got, expected, advice)
    ((count,),) = sizes
    return int(count)
