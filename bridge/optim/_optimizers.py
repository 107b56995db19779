"""Keras optimizers as optax transformations."""

from typing import Any

import keras
import optax

from bridge.optim import _native
from bridge.optim._constraints import constraints
from bridge.optim._optax_optimizer import OptaxOptimizer
from bridge.optim._wrapped import Wrapped
from functrain.internal import PyTree


def optimizer(
    keras_optimizer: Any, *, model: keras.Layer | None = None, native: bool = False
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
    number: ``tx.update(grads, opt_state, params, loss_scale=scale)``. With `use_ema` the average
    is ``opt_state.slots["model_variables_moving_average"]``; at the end of its own `fit` Keras
    assigns it to the model, which is left to you here.

    Args:
      keras_optimizer: Any `keras.optimizers.Optimizer`. It is copied as it is now and never
        changed. If it has been built, for a model that was trained, its slots are not in
        ``init(params)``, which starts anew: see `bridge.create_state`.
      model: The model whose params, as `bridge.create_state` makes them, will be trained: all of
        them, or those that `optax.masked` and `optax.multi_transform` leave. With it, updates
        end within the constraints of its variables, variables excluded from weight decay by
        identity are known, and float8 scales are overwritten as Keras does it.
      native: Whether to take optax's own pieces where they say the same. They need fewer
        operations and no params, and other optax code knows their states. The table below says
        for which; for all else, Keras's code is wrapped.

    Returns:
      The transformation. Its state is a `KerasOptState(scalars, slots)`, or that of a chain, and
      unless it is native its `update` needs params.

    Native pieces, and the largest difference of a parameter from Keras's after 100 steps of
    gradients from 1e-6 to 1e6 in size, as a share of the largest parameter (float32, CPU):

    ========================= ============================================== ==========
    Keras                     optax                                          difference
    ========================= ============================================== ==========
    SGD, momentum, nesterov   scale_by_learning_rate, trace                  0
    Adam, AdamW               scale_by_adam with eps where Keras has it      1e-7, 9e-7
    Adamax                    scale_by_adamax                                1e-7
    RMSprop, momentum         scale_by_rms(eps_in_sqrt=True), trace          2e-7
    Adagrad                   scale_by_rss                                   1e-7
    Adadelta                  scale_by_adadelta                              1e-7
    Lion, with weight decay   scale_by_lion                                  0, 9e-7
    Lamb                      scale_by_adam, scale_by_trust_ratio            4e-7
    clipvalue, clipnorm       clip, scaling of each array                    as above
    global_clipnorm           clip_by_global_norm                            as above
    any schedule              the same function                              as above
    ========================= ============================================== ==========

    Wrapped, since optax says something else or nothing: amsgrad, centered RMSprop, weight decay
    with momentum that holds the learning rate (SGD, RMSprop) and in Lamb, EMA, accumulation
    (which indexes schedules by microstep, unlike `optax.MultiSteps`), Adafactor, Ftrl, Muon,
    Nadam, ScheduleFreeAdamW, LossScaleOptimizer, MultiOptimizer and classes of one's own. In
    bfloat16 the pieces round elsewhere: within 2e-2, but 4e-2 for Lion, where a sign turns, and
    far apart for Lamb, whose norms have 8 bits.

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
    if isinstance(inner(keras_optimizer), OptaxOptimizer):
        pieces = inner(keras_optimizer).tx
    else:
        wrapped = Wrapped(keras_optimizer, model)  # also where it is not used: it refuses bad input
        pieces = _native.native(keras_optimizer) if native else None
        if pieces is None:
            return _made(wrapped, keras_optimizer)
    if model is not None and any(v.constraint for v in model.trainable_variables):
        pieces = optax.chain(pieces, constraints(model))
    return _made(pieces, keras_optimizer)


def made_of(tx: Any) -> Any:
    """Returns the Keras optimizer that `optimizer` made a transformation of, or None."""
    return getattr(tx.init, "keras_optimizer", None)


def _made(tx: Any, keras_optimizer: Any) -> optax.GradientTransformationExtraArgs:
    def init(params: PyTree) -> PyTree:
        return tx.init(params)

    init.keras_optimizer = keras_optimizer  # type: ignore[attr-defined]
    update = tx.update if isinstance(tx, Wrapped) else optax.with_extra_args_support(tx).update
    return optax.GradientTransformationExtraArgs(init, update)


def inner(optimizer: Any) -> Any:
    """Returns the optimizer in a LossScaleOptimizer, or the optimizer itself."""
    return getattr(optimizer, "inner_optimizer", optimizer)
