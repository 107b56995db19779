"""An average of the params, kept by the optimizer."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from functrain.common import _tree
from functrain.common._checks import require
from functrain.common._types import PyTree


class EmaState(NamedTuple):
    """What `ema` remembers.

    Attributes:
      ema: The average, structured like the params; float32 where they are narrower.
      weight: `f32[]`, the weight that it has gathered, to be divided by; None without `debias`.
    """

    ema: PyTree
    weight: jax.Array | None


def ema(decay: float, *, debias: bool = False) -> optax.GradientTransformationExtraArgs:
    """Returns the transformation that averages the params as they are after each update.

    `optax.ema` averages the updates; this averages the params:
    ``ema = decay * ema + (1 - decay) * params``, from the first params on. It changes no update,
    and comes last in a chain: ``optax.chain(optax.adam(1e-3), ft.tx.ema(0.999))``. Being part
    of `opt_state` it is saved, sharded and fused with it; `ema_params` finds it there.

    `skip_non_finite` around it leaves the average as it is, too. Inside `optax.MultiSteps`, in
    ``MultiSteps(optax.chain(tx, ema(d)), n)``, it takes a step with each update of the
    params, every n-th; behind it, in ``optax.chain(MultiSteps(tx, n), ema(d))``, with every
    step, most of which change no params.

    Args:
      decay: From 0 up to 1, exclusive.
      debias: Begin at zero, and divide by the weight gathered, ``1 - decay**n``, as Adam does: the
        first params do not count.

    Returns:
      A transformation whose `update` needs params. It averages in float32 or wider.

    Raises:
      ValueError: `decay` is out of range; or, from `update`, params are missing.

    Examples:
      >>> import jax.numpy as jnp, optax
      >>> from functrain import TrainState
      >>> tx = optax.chain(optax.sgd(1.0), ema(0.5))
      >>> state = TrainState.create(params={"w": jnp.zeros(2)}, tx=tx)
      >>> state = state.apply_gradients({"w": jnp.ones(2)}, tx)
      >>> print(state.params["w"], ema_params(state)["w"])
      [-1. -1.] [-0.5 -0.5]
    """
    require(0 <= decay < 1, "decay", "a number from 0 up to 1, exclusive", decay)

    def init(params: PyTree) -> EmaState:
        if debias:
            zeros = optax.tree.zeros_like(jax.tree.map(_tree.at_least_float32, params))
            return EmaState(zeros, jnp.zeros(()))
        return EmaState(jax.tree.map(_tree.at_least_float32, params), None)

    def update(
        updates: PyTree, state: EmaState, params: PyTree = None, **extra_args: Any
    ) -> tuple[PyTree, EmaState]:
        expected = "params, as in tx.update(grads, state, params)"
        require(params is not None, "ema", expected, params)
        new = jax.tree.map(_rounded, optax.apply_updates(params, updates))
        ema = jax.tree.map(
            lambda old, x: decay * old + (1 - decay) * _tree.at_least_float32(x), state.ema, new
        )
        weight = None if state.weight is None else decay * state.weight + (1 - decay)
        return updates, EmaState(ema, weight)

    return optax.GradientTransformationExtraArgs(init, update)


def _rounded(x: jax.Array) -> jax.Array:
    """Makes sure of the rounding to half precision, which compilers leave out on the way."""
    if x.dtype.itemsize >= 4:
        return x
    kind = jnp.finfo(x.dtype)  # type: ignore[no-untyped-call]  # of ml_dtypes
    return jax.lax.reduce_precision(x, kind.nexp, kind.nmant)


def ema_params(state: Any) -> PyTree:
    """Returns the averaged params of a state whose optimizer has `ema` in it.

    ``state.replace(params=ft.tx.ema_params(state))`` is the state to evaluate, predict or export
    with, and ``ft.eval_step(loss_fn, get_state=...)`` takes a function that returns it. Do not
    train it: the average is continued from `state`.

    Args:
      state: A TrainState.

    Returns:
      The average, in the structure and the dtypes of `state.params`; before the first step,
      `state.params`.

    Raises:
      ValueError: The optimizer keeps no average, or several, or one of some params only.

    Examples:
      >>> import jax.numpy as jnp, optax
      >>> from functrain import TrainState
      >>> tx = optax.chain(optax.sgd(1.0), ema(0.9, debias=True))
      >>> state = TrainState.create(params={"w": jnp.ones(2)}, tx=tx)
      >>> print(ema_params(state)["w"])
      [1. 1.]
    """
    found = _tree.nodes(state.opt_state, EmaState)
    if len(found) != 1 or _tree.structure(found[0].ema) != _tree.structure(state.params):
        raise ValueError(
            "opt_state: expected one average of all params, got "
            f"{'one of some' if len(found) == 1 else len(found)}. Create the state, and its step, "
            "with tx = optax.chain(tx, functrain.tx.ema(0.999)), around groups if there are."
        )
    ema, weight = found[0]

    def value(average: jax.Array, param: jax.Array) -> jax.Array:
        if weight is not None:
            safe = jnp.where(weight > 0, weight, 1.0)
            average = jnp.where(weight > 0, average / safe, param.astype(average.dtype))
        return average.astype(param.dtype)

    return jax.tree.map(value, ema, state.params)
