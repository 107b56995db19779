"""An exponential moving average of the params as an optax transformation."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from functrain.common import _tree
from functrain.common._checks import require
from functrain.common._types import PyTree


class EmaState(NamedTuple):
    """The state of `ema`.

    Attributes:
      ema: The average, with the structure of the params; float32 for params in half precision.
        Zeros before the first update.
      weight: `f32[]`, the sum of the weights of the params averaged so far, by which the average
        is divided: 0 before the first update, and without `debias` 1 from then on.
    """

    ema: PyTree
    weight: jax.Array


def ema(decay: float, *, debias: bool = False) -> optax.GradientTransformationExtraArgs:
    """Returns a transformation that keeps an exponential moving average (EMA) of the params.

    This differs from `optax.ema`, which averages the updates and replaces them by their average.
    This one averages the params after each update,
    ``ema = decay * ema + (1 - decay) * new_params``, starting from the params before the first
    update, and passes the updates through unchanged. It must come last in a chain:
    ``optax.chain(optax.adam(1e-3), ft.tx.ema(0.999))``. The average is part of `opt_state`, so it
    is saved, sharded and fused with it; `ema_params` returns it.

    Inside `skip_non_finite`, a skipped step does not change the average. Inside
    `optax.MultiSteps`, as in ``MultiSteps(optax.chain(tx, ema(d)), n)``, the average is updated
    whenever the params are, in every n-th step. After it, as in
    ``optax.chain(MultiSteps(tx, n), ema(d))``, the average is updated in every step, including
    those that do not change the params.

    Args:
      decay: The decay rate, at least 0 and less than 1.
      debias: Start from zero and divide by ``1 - decay**n`` after n updates, as Adam does, so that
        the params before the first update are not part of the average.

    Returns:
      A transformation whose `update` needs params. It averages in float32 or wider.

    Raises:
      ValueError: `decay` is out of range. From `update`: params are missing.

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
        # In bfloat16, with 8 significant bits, small changes such as 0.001 * params would be lost.
        zeros = optax.tree.zeros_like(jax.tree.map(_tree.at_least_float32, params))
        return EmaState(zeros, jnp.zeros(()))

    def update(
        updates: PyTree, state: EmaState, params: PyTree = None, **extra_args: Any
    ) -> tuple[PyTree, EmaState]:
        expected = "params, as in tx.update(grads, state, params)"
        require(params is not None, "ema", expected, params)
        new_params = jax.tree.map(_round_to_dtype, optax.apply_updates(params, updates))

        def average(ema: jax.Array, old_param: jax.Array, param: jax.Array) -> jax.Array:
            if not debias:
                # Not from `init`, whose params a warm start may have replaced since.
                ema = jnp.where(state.weight > 0, ema, _tree.at_least_float32(old_param))
            return decay * ema + (1 - decay) * _tree.at_least_float32(param)

        new_ema = jax.tree.map(average, state.ema, params, new_params)
        weight = decay * state.weight + (1 - decay) if debias else jnp.ones(())
        return updates, EmaState(new_ema, weight)

    return optax.GradientTransformationExtraArgs(init, update)


def _round_to_dtype(x: jax.Array) -> jax.Array:
    """Returns `x` unchanged, and prevents the compiler from skipping its rounding.

    XLA may keep a value in float32 between a cast to half precision and a cast back. The average
    would then be that of params which the state never held.
    """
    if x.dtype.itemsize >= 4:
        return x
    float_info = jnp.finfo(x.dtype)  # type: ignore[no-untyped-call]  # of ml_dtypes
    return jax.lax.reduce_precision(x, float_info.nexp, float_info.nmant)


def ema_params(state: Any) -> PyTree:
    """Returns the averaged params of a state whose optimizer includes `ema`.

    `averaged` returns the state with them, to evaluate, predict or export with.

    Args:
      state: A TrainState.

    Returns:
      The average, with the structure and the dtypes of `state.params`. Before the first step it
      equals `state.params`.

    Raises:
      ValueError: The optimizer includes no average, several averages, or an average of only some
        params.

    Examples:
      >>> import jax.numpy as jnp, optax
      >>> from functrain import TrainState
      >>> tx = optax.chain(optax.sgd(1.0), ema(0.9, debias=True))
      >>> state = TrainState.create(params={"w": jnp.ones(2)}, tx=tx)
      >>> print(ema_params(state)["w"])
      [1. 1.]
    """
    averages = _tree.nodes(state.opt_state, EmaState)
    covers_all_params = len(averages) == 1 and (
        _tree.structure(averages[0].ema) == _tree.structure(state.params)
    )
    advice = (
        "Create the state and its step with tx = optax.chain(tx, functrain.tx.ema(0.999)); with "
        "param groups, put ema after the groups."
    )
    require(covers_all_params, "opt_state", "one average of all params", averages, advice)
    ema, weight = averages[0]

    def debiased(average: jax.Array, param: jax.Array) -> jax.Array:
        # `where` evaluates both branches, and 0 / 0 would be NaN.
        divisor = jnp.where(weight > 0, weight, 1.0)
        average = jnp.where(weight > 0, average / divisor, param.astype(average.dtype))
        return average.astype(param.dtype)

    return jax.tree.map(debiased, ema, state.params)


def averaged(state: Any) -> Any:
    """Returns a state with the averaged params of `ema_params` in place of its own.

    It is the state to evaluate, predict or export with:
    ``ft.eval_step(loss_fn, get_state=ft.tx.averaged)``. Do not train it: the average is continued
    from `state`.

    Args:
      state: A TrainState whose optimizer includes `ema`.

    Raises:
      ValueError: As for `ema_params`.

    Examples:
      >>> import jax.numpy as jnp, optax
      >>> from functrain import TrainState
      >>> tx = optax.chain(optax.sgd(1.0), ema(0.5))
      >>> state = TrainState.create(params={"w": jnp.zeros(2)}, tx=tx)
      >>> state = state.apply_gradients({"w": jnp.ones(2)}, tx)
      >>> print(state.params["w"], averaged(state).params["w"])
      [-1. -1.] [-0.5 -0.5]
    """
    return state.replace(params=ema_params(state))
