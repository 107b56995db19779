"""Keras optimizers as optax transformations."""

from typing import Any

import keras
import optax

from bridge.optim._constraints import constraints
from bridge.optim._optax_optimizer import OptaxOptimizer
from bridge.optim._wrapped import Wrapped
from functrain.internal import PyTree, require, with_any_extra_args


def optimizer(
    keras_optimizer: Any, *, model: keras.Layer | None = None
) -> optax.GradientTransformationExtraArgs:
    """Returns a Keras optimizer as an optax transformation.

    The transformation runs Keras's own code on any pytree of params, under jit, scan and vmap. This
    includes weight decay and its exclusions, clipping, EMA with overwriting, gradient accumulation
    and schedules. All slots equal Keras's to the bit. Params equal Keras's to the bit if they keep
    their sign and at least half of their size; otherwise there may be no update that leads exactly
    to the params that Keras assigns. In all cases ``params + updates`` is within
    ``2 * eps * max(|old|, |new|)`` of them: one rounding comes from the subtraction, the other from
    the compiler, which may fuse it with Keras's last operation.

    The names in Muon's `exclude_layers` and in an OptimizerMap are matched against the paths of the
    params, or with `model` against the paths of its variables. Those in
    `exclude_from_weight_decay(var_names=...)` are matched against the last part of a path only, as
    in Keras: "kernel", not the name of a layer. `var_list=` is refused.

    Gradients must be those of the unscaled loss, and `loss_scale_factor` is ignored. A
    LossScaleOptimizer skips updates that would overflow at its scale; to scale the loss before it
    is differentiated, use `functrain.tx.loss_scale`.

    With `use_ema` the average is ``opt_state.slots["model_variables_moving_average"]``. Keras
    assigns it to the model at the end of `fit`; here you have to do that yourself.

    Args:
      keras_optimizer: Any `keras.optimizers.Optimizer`. It is copied now and never changed. The
        slots of an optimizer that has been built are not part of ``init(params)``, which returns
        initial slots: see `bridge.create_state`.
      model: The model whose params, as `bridge.create_state` returns them, will be trained: all of
        them, or those that `optax.masked` or `optax.multi_transform` selects. With a model, updates
        apply the constraints of its variables.

    Returns:
      The transformation. Its state is a `KerasOptState(scalars, slots)`, and its `update` needs
      params.

    Raises:
      TypeError: `keras_optimizer` is not a Keras optimizer, or its learning rate is an optax
        schedule.
      ValueError: It excludes variables from weight decay by `var_list=`. From `update`: params are
        missing, or gradients or state do not match them.

    Examples:
      >>> import jax.numpy as jnp, keras, optax
      >>> tx = optimizer(keras.optimizers.SGD(0.5, momentum=0.9))
      >>> params = {"w": jnp.ones(3)}
      >>> state = tx.init(params)
      >>> updates, state = tx.update({"w": jnp.ones(3)}, state, params)
      >>> print(optax.apply_updates(params, updates)["w"])
      [0.5 0.5 0.5]
      >>> sorted(state.slots)
      ['momentums']
    """
    is_optimizer = isinstance(keras_optimizer, keras.optimizers.Optimizer)
    expected = "a keras.optimizers.Optimizer, such as keras.optimizers.get('adam')"
    require(is_optimizer, "keras_optimizer", expected, keras_optimizer, error=TypeError)
    if not isinstance(inner_optimizer(keras_optimizer), OptaxOptimizer):
        # Keras's code applies the constraints itself.
        return _with_origin(Wrapped(keras_optimizer, model), keras_optimizer)
    tx = inner_optimizer(keras_optimizer).tx
    if model is not None and any(v.constraint for v in model.trainable_variables):
        tx = optax.chain(tx, constraints(model))
    return _with_origin(tx, keras_optimizer)


def origin(tx: Any) -> Any:
    """Returns the Keras optimizer that `optimizer` converted to a transformation, or None."""
    return getattr(tx.init, "keras_optimizer", None)


def _with_origin(tx: Any, keras_optimizer: Any) -> optax.GradientTransformationExtraArgs:
    def init(params: PyTree) -> PyTree:
        return tx.init(params)

    # A transformation is a tuple of functions without attributes, but a function can have one.
    init.keras_optimizer = keras_optimizer  # type: ignore[attr-defined]
    return optax.GradientTransformationExtraArgs(init, with_any_extra_args(tx).update)


def inner_optimizer(optimizer: Any) -> Any:
    """Returns the optimizer in a LossScaleOptimizer, or the optimizer itself."""
    return getattr(optimizer, "inner_optimizer", optimizer)


def step_counter(optimizer: Any) -> Any:
    """Returns the variable that counts steps.

    The public `iterations` is that count divided by the steps of gradient accumulation.
    """
    return inner_optimizer(optimizer).variables[0]
