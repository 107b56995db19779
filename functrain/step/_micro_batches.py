"""Large batches in little memory: cut up, and their gradients added."""

from collections.abc import Callable
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
from jax.custom_derivatives import SymbolicZero

from functrain.common import _tree
from functrain.common._checks import require_integer, require_no_problems
from functrain.common._types import PyTree
from functrain.step._check import check_loss
from functrain.step._loss import Aux, LossFn
from functrain.step._update import value_of

Value: TypeAlias = tuple[jax.Array, Aux]  # what a loss returns


def micro_batches(loss_fn: LossFn, size: int) -> LossFn:
    """Returns the loss of a large batch, computed on a few examples at a time.

    The gradient is that of the large batch up to rounding, ``sum(w_i * g_i) / sum(w_i)`` over the
    micro-batches, with weighted examples and a smaller last one, too. It is computed together with
    the loss: no forward pass is run twice, and memory holds what one micro-batch needs. Being a
    loss it goes where losses go: `train_step`, `update`, `eval_step`, `jax.grad`.

    What looks at a whole batch looks at a micro-batch: batch statistics, which are carried on from
    one to the next, and random numbers, drawn from ``fold_in(rng, i)``.

    Args:
      loss_fn: The loss, a mean over examples. Where it is divided by something else than their
        number, it says so in ``Aux.weight``, as `supervised` does for
        ``reduction="weighted_mean"`` and for the masks and weights of `bridge.loss`.
      size: Examples in a micro-batch. All arguments behind `model_state` are cut along their first
        axis; what is not to be cut is closed over. Of n micro-batches the i-th has every n-th
        example from i on, and so lies on as many devices as the batch; a smaller one at the end
        has those that are left. Up to `size` examples, the loss is `loss_fn` as it is.

    Returns:
      The loss, with an Aux of all examples: `outputs` are concatenated, `logs` averaged by weight.
      It adds up in float32 or wider. Its gradient is that of the value with respect to params.

    Raises:
      ValueError: `size` is below 1. (When traced) the arguments, or the outputs, have no first axis
        in common, or the loss says that it is no mean.
      TypeError: (when traced) a gradient is asked for with respect to something else than params.

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

    def whole(
        params: PyTree, model_state: PyTree, /, *args: PyTree, rng: jax.Array | None, training: bool
    ) -> Value:
        def value(params: PyTree, model_state: PyTree, rng: Any, args: PyTree) -> Value:
            return value_of(loss_fn, params, model_state, *args, rng=rng, training=training)

        at_once = _examples(args) <= size
        return (value if at_once else _with_gradient(value, size))(params, model_state, rng, args)

    return whole


def _with_gradient(value: Callable[..., Value], size: int) -> Callable[..., Value]:
    """Returns ``(params, model_state, rng, args) -> (loss, Aux)``, whose gradient comes with it."""

    @jax.custom_vjp
    def whole(*primals: PyTree) -> Value:
        return _total(lambda *of: (value(*of), ()), size, *primals)[0]

    def forward(*primals: PyTree) -> tuple[Value, PyTree]:
        if any(x.perturbed for x in jax.tree.leaves(primals[1:], is_leaf=_is_primal)):
            raise TypeError(_PARAMS_ONLY.format("model_state, the batch or rng"))
        primals = jax.tree.map(lambda x: x.value, primals, is_leaf=_is_primal)
        return _total(jax.value_and_grad(value, has_aux=True), size, *primals)

    def backward(grads: PyTree, cotangents: tuple[Any, Any]) -> tuple[PyTree, None, None, None]:
        of_loss, of_aux = cotangents
        if not all(isinstance(x, SymbolicZero) for x in jax.tree.leaves(of_aux)):
            raise TypeError(_PARAMS_ONLY.format("what is in Aux"))
        if isinstance(of_loss, SymbolicZero):
            return jax.tree.map(jnp.zeros_like, grads), None, None, None
        return jax.tree.map(lambda g: (g * of_loss).astype(g.dtype), grads), None, None, None

    whole.defvjp(forward, backward, symbolic_zeros=True)
    return whole


_PARAMS_ONLY = (
    "micro_batches: expected the gradient of the loss with respect to params, which is all that it "
    "adds up; got one that goes through {}. Take that of loss_fn itself."
)


def _is_primal(x: Any) -> bool:
    return hasattr(x, "perturbed")


def _cut(x: jax.Array, parts: int) -> jax.Array:
    """Puts every n-th example into a part, so that each part lies on all devices, as all do."""
    return x.reshape(x.shape[0] // parts, parts, *x.shape[1:]).swapaxes(0, 1)


def _uncut(x: jax.Array) -> jax.Array:
    return x.swapaxes(0, 1).reshape(x.shape[0] * x.shape[1], *x.shape[2:])


def _total(
    of: Callable[..., Any], size: int, params: PyTree, model_state: PyTree, rng: Any, args: PyTree
) -> tuple[Value, PyTree]:
    """Runs the micro-batches one after the other; returns the loss, the Aux and the gradients.

    Of each they are ``of(params, model_state, rng, args) -> ((loss, Aux), gradients or ())``.
    """

    def measure(model_state: PyTree, i: Any, args: PyTree) -> Any:
        key = None if rng is None else jax.random.fold_in(rng, i)
        return of(params, model_state, key, args)

    count = _examples(args)
    full = count // size
    whole = args if count == full * size else jax.tree.map(lambda x: x[: full * size], args)
    stacked = jax.tree.map(lambda x: _cut(x, full), whole)

    def step(carry: tuple[PyTree, PyTree], at: tuple[Any, PyTree]) -> Any:
        model_state, sums = carry
        (loss, aux), grads = measure(model_state, *at)
        terms = _weighted(loss, aux, grads, count=_examples(at[1]))
        return (aux.model_state, jax.tree.map(jnp.add, sums, terms)), aux.outputs

    first = jax.tree.map(lambda x: x[0], stacked)
    (loss, aux), grads = jax.eval_shape(measure, model_state, 0, first)
    _check_mean(aux)
    _check_outputs(aux.outputs, size)
    none = jax.eval_shape(lambda *x: _weighted(*x, count=size), loss, aux, grads)
    zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), none)
    carry, outputs = jax.lax.scan(step, (model_state, zeros), (jnp.arange(full), stacked))
    outputs = jax.tree.map(_uncut, outputs)
    if count % size:
        rest = jax.tree.map(lambda x: x[full * size :], args)
        carry, last = step(carry, (full, rest))
        outputs = jax.tree.map(lambda a, b: jnp.concatenate([a, b]), outputs, last)
    model_state, (weight, *sums) = carry
    # A batch of zero weights has no loss, as in `supervised`.
    total = jnp.where(weight == 0, jnp.ones_like(weight), weight)
    loss_sum, logs, grads_sum = jax.tree.map(lambda x: x / total.astype(x.dtype), sums)
    loss, grads = jax.tree.map(
        lambda x, like: x.astype(like.dtype), (loss_sum, grads_sum), (loss, grads)
    )
    return (loss, Aux(model_state, outputs, logs, None if aux.weight is None else weight)), grads


def _weighted(loss: jax.Array, aux: Aux, grads: PyTree, *, count: int) -> tuple[PyTree, ...]:
    """Returns what is added up: a micro-batch's weight, and what it says times its weight."""
    weight = jnp.asarray(count if aux.weight is None else aux.weight, jnp.float32)

    def times(x: Any) -> Any:
        x = _tree.at_least_float32(jnp.asarray(x))
        return x * weight.astype(x.dtype)

    return weight, *jax.tree.map(times, (loss, aux.logs, grads))


def _examples(args: PyTree) -> int:
    """Returns how many examples all leaves have."""
    sizes = {jnp.shape(x)[:1] for x in jax.tree.leaves(args)}
    if len(sizes) != 1 or () in sizes:
        got = _tree.format_leaves(args) or "  no arrays"
        expected = "arrays with a first axis in common, that of the examples"
        require_no_problems(
            "micro_batches", got, expected, "The loss closes over what is not to be cut."
        )
    ((count,),) = sizes
    return int(count)


def _check_mean(aux: Aux) -> None:
    if isinstance(aux.weight, tuple):
        raise ValueError(
            "micro_batches: expected a loss that is one mean over examples, got a sum, or several "
            "means with masks or weights of their own. Take a mean, with Keras "
            "reduction='sum_over_batch_size'; or cut the batches, with optax.MultiSteps."
        )


def _check_outputs(outputs: PyTree, size: int) -> None:
    wrong = _tree.format_leaves(outputs, lambda x: x.shape[:1] != (size,))
    expected = f"outputs with the first axis of a micro-batch, {size}"
    require_no_problems("micro_batches", wrong, expected, "Scalars belong into Aux(logs=...).")
