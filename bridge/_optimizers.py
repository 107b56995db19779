"""Keras optimizers as optax transformations."""

from typing import Any

import keras
import optax

from bridge._wrapped import Wrapped


def optimizer(
    keras_optimizer: Any, *, model: keras.Layer | None = None
) -> optax.GradientTransformationExtraArgs:
    """Returns a Keras optimizer as an optax transformation.

    It runs Keras's own code on any pytree of params, under jit, scan and vmap: weight decay and
    its exclusions, clipping, EMA with overwriting, gradient accumulation and schedules included.
    All slots are Keras's to the bit. So are params, where they keep their sign and half of their
    size: elsewhere no update leads exactly to the params that Keras assigns. In all, ``params +
    updates`` is within ``2 * eps * max(|old|, |new|)`` of them: one rounding is the subtraction's,
    the other one the compiler's, which may fuse it with Keras's last operation.

    Names that a setting goes by (`exclude_from_weight_decay(var_names=...)`, Muon's
    `exclude_layers`, an OptimizerMap) are looked for in the paths of the params; with `model`
    in those of its variables. Loss scaling: gradients are those of the loss itself, and
    `loss_scale_factor` plays no part. A LossScaleOptimizer skips updates that would overflow at
    its scale. To scale the loss before it is differentiated, multiply it by
    ``opt_state.scalars["loss_scale/dynamic_scale"]``, or by a factor of yours, and pass that
    number: ``tx.update(grads, opt_state, params, loss_scale=scale)``.

    Args:
      keras_optimizer: Any `keras.optimizers.Optimizer`. It is copied as it is now and never
        changed. If it has been built, for a model that was trained, its slots are not in
        ``init(params)``, which starts anew: see `bridge.create_state`.
      model: The model whose params, as `bridge.create_state` makes them, will be trained. With
        it, updates end within the constraints of its variables, variables excluded from weight
        decay by identity are known, and float8 scales are overwritten as Keras does it.

    Returns:
      The transformation. Its state is a `KerasOptState(scalars, slots)`, and its `update` needs
      params.

    Raises:
      TypeError: This is no Keras optimizer, or its learning rate is an optax schedule.
      ValueError: It was built for another model, or excludes variables that are not known; from
        `update`: params are missing, or gradients or state do not fit them.

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
    if not isinstance(keras_optimizer, keras.optimizers.Optimizer):
        hint = "It is an optax transformation already." if hasattr(keras_optimizer, "init") else ""
        raise TypeError(
            "keras_optimizer: expected a keras.optimizers.Optimizer, such as "
            f"keras.optimizers.get('adam'), got {keras_optimizer!r}. {hint}"
        )
    wrapped = Wrapped(keras_optimizer, model)
    return optax.GradientTransformationExtraArgs(wrapped.init, wrapped.update)
