"""Keras optimizers built from optax transformations, where these compute the same."""

import functools
import re
from collections.abc import Callable
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import keras
import optax

from bridge import keras_private
from bridge.optim._schedules import schedule
from bridge.optim._slots import kind_of
from functrain.internal import PyTree
from functrain.internal import tree as _tree

K = keras.optimizers


class KerasCount(NamedTuple):
    """The number of updates. It also marks the chains that `native` returns.

    Attributes:
      iterations: The number, `i32[]`.
      kind: The `kind_of` the optimizer, without leaves.
    """

    iterations: jax.Array
    kind: Any


def native(optimizer: Any) -> optax.GradientTransformation | None:
    """Returns a Keras optimizer as a chain of optax transformations, or None if there is none."""
    make_parts = _PARTS.get(type(optimizer))
    parts = make_parts(optimizer) if make_parts and _is_plain(optimizer) else None
    if parts is None:
        return None
    before_rate, after_rate = parts
    decay = [] if optimizer.weight_decay is None else [_weight_decay(optimizer)]
    # The decay would become part of the momentum. In Keras it does not.
    if after_rate and decay:
        return None
    rate = keras_private.optimizers.learning_rate(optimizer)
    scale = optax.scale_by_learning_rate(
        float(optimizer.learning_rate) if rate is None else schedule(rate)
    )
    return optax.chain(
        *_clip(optimizer), *before_rate, *decay, scale, *after_rate, _count(optimizer)
    )


def _is_plain(optimizer: Any) -> bool:
    """Returns True if the optimizer uses no feature that optax lacks or computes otherwise."""
    rate = keras_private.optimizers.learning_rate(optimizer)
    rate_is_function = rate is not None and not isinstance(rate, K.schedules.LearningRateSchedule)
    # Variables excluded by identity are unknown here. `_weight_decay` handles names.
    excluded_ids, _ = keras_private.optimizers.excluded_from_weight_decay(optimizer)
    # Keras indexes schedules by microstep, unlike `optax.MultiSteps`.
    accumulates = optimizer.gradient_accumulation_steps
    return not (rate_is_function or excluded_ids or optimizer.use_ema or accumulates)


def _clip(optimizer: Any) -> list[optax.GradientTransformation]:
    """Returns the optimizer's clipping as a list of one transformation, or of none."""
    # Keras raises an error if more than one kind of clipping is set.
    if optimizer.clipnorm:
        return [clip_each_by_norm(optimizer.clipnorm)]
    if optimizer.global_clipnorm:
        return [optax.clip_by_global_norm(optimizer.global_clipnorm)]
    return [optax.clip(optimizer.clipvalue)] if optimizer.clipvalue else []


def clip_each_by_norm(max_norm: float) -> optax.GradientTransformation:
    """Returns a transformation that scales each array down to an L2 norm of at most `max_norm`."""

    def clip(g: jax.Array, _: Any) -> jax.Array:
        norm = jnp.sqrt(jnp.sum(jnp.square(g)))
        return g * max_norm / jnp.maximum(norm, max_norm).astype(g.dtype)

    # `optax.clip_by_block_rms` limits the root mean square instead.
    return optax.stateless_with_tree_map(clip)


def _weight_decay(optimizer: Any) -> optax.GradientTransformation:
    _, pattern = keras_private.optimizers.excluded_from_weight_decay(optimizer)

    def is_decayed(path: Any, _: Any) -> bool:
        name = jax.tree_util.keystr(path[-1:], simple=True)
        return not (pattern and re.search(pattern, name))

    mask = functools.partial(jax.tree_util.tree_map_with_path, is_decayed)
    return optax.add_decayed_weights(optimizer.weight_decay, mask)


def _count(optimizer: Any) -> optax.GradientTransformation:
    kind = kind_of(optimizer)

    def update(updates: PyTree, state: KerasCount, params: PyTree = None) -> Any:
        del params
        # Stays at the largest int32 instead of overflowing.
        return updates, KerasCount(optax.safe_increment(state.iterations), kind)

    return optax.GradientTransformation(
        lambda params: KerasCount(jnp.zeros((), jnp.int32), kind), update
    )


def scale_by_keras_adam(b1: float, b2: float, eps: float) -> optax.GradientTransformation:
    """Returns `optax.scale_by_adam` with Keras's epsilon.

    Keras adds eps to the root of the uncorrected second moment. Optax corrects the moment for its
    bias first, so that the same eps has more effect in early steps.
    """

    def update(grads: PyTree, state: optax.ScaleByAdamState, params: PyTree = None) -> Any:
        del params
        count = optax.safe_increment(state.count)
        mu = jax.tree.map(lambda m, g: m + (g - m) * (1 - b1), state.mu, grads)
        nu = jax.tree.map(lambda v, g: v + (jnp.square(g) - v) * (1 - b2), state.nu, grads)

        def scale(m: jax.Array, v: jax.Array) -> jax.Array:
            t = count.astype(m.dtype)
            # In the dtype of the moments, as Keras computes it.
            b1_power = jnp.power(jnp.asarray(b1, m.dtype), t)
            b2_power = jnp.power(jnp.asarray(b2, m.dtype), t)
            return m * (jnp.sqrt(1 - b2_power) / (1 - b1_power)) / (jnp.sqrt(v) + eps)

        return jax.tree.map(scale, mu, nu), optax.ScaleByAdamState(count, mu, nu)

    # With the state of optax's Adam, so that `slot_fields` and other optax code understand it.
    return optax.GradientTransformation(optax.scale_by_adam(b1, b2).init, update)


# The transformations before and after the multiplication by the learning rate.
Parts: TypeAlias = tuple[list[optax.GradientTransformation], list[optax.GradientTransformation]]


def _adam(o: Any) -> Parts | None:
    # By default optax's AMSGrad takes the maximum of corrected moments, Keras of uncorrected ones.
    return None if o.amsgrad else ([scale_by_keras_adam(o.beta_1, o.beta_2, o.epsilon)], [])


def _rmsprop(o: Any) -> Parts | None:
    """Returns the transformations before and after the learning rate of Keras's RMSprop."""
    if o.centered:
        return None
    # Keras's RMSprop keeps its momentum with the sign of the gradient, its SGD with the sign of
    # the update. The two changes of sign affect the kept state only, not the updates.
    negate = optax.scale(-1.0)
    momentum = [negate, optax.trace(o.momentum), negate] if o.momentum else []
    return [optax.scale_by_rms(o.rho, o.epsilon, eps_in_sqrt=True)], momentum


def _lamb(o: Any) -> Parts | None:
    # Keras computes the norm of the params after their decay.
    if o.weight_decay is not None:
        return None
    return [optax.scale_by_adam(o.beta_1, o.beta_2, o.epsilon), optax.scale_by_trust_ratio()], []


# Keras multiplies by the learning rate before the momentum, so that `trace` comes after the rate.
# In `optax.sgd` it comes before. With a schedule the results differ.
_PARTS: dict[type, Callable[[Any], Parts | None]] = {
    K.SGD: lambda o: ([], [optax.trace(o.momentum, nesterov=o.nesterov)] if o.momentum else []),
    K.Adam: _adam,
    K.AdamW: _adam,
    K.Adamax: lambda o: ([optax.scale_by_adamax(o.beta_1, o.beta_2, o.epsilon)], []),
    K.RMSprop: _rmsprop,
    K.Adagrad: lambda o: ([optax.scale_by_rss(o.initial_accumulator_value, o.epsilon)], []),
    K.Adadelta: lambda o: ([optax.scale_by_adadelta(o.rho, o.epsilon)], []),
    K.Lion: lambda o: ([optax.scale_by_lion(o.beta_1, o.beta_2)], []),
    K.Lamb: _lamb,
}


# For each Keras optimizer, the fields of optax states that have the same values as Keras's slots.
_MOMENTS = {"mu": "momentums", "nu": "velocities"}
_SLOT_FIELDS: dict[type, dict[type, dict[str, str]]] = {
    K.SGD: {optax.TraceState: {"trace": "momentums"}},
    K.Adam: {optax.ScaleByAdamState: _MOMENTS},
    K.AdamW: {optax.ScaleByAdamState: _MOMENTS},
    K.Lamb: {optax.ScaleByAdamState: _MOMENTS},
    K.Adamax: {optax.ScaleByAdamState: {"mu": "m", "nu": "u"}},
    K.RMSprop: {
        optax.ScaleByRmsState: {"nu": "velocities"},
        optax.TraceState: {"trace": "momentums"},
    },
    K.Adagrad: {optax.ScaleByRssState: {"sum_of_squares": "accumulators"}},
    K.Adadelta: {
        optax.ScaleByAdaDeltaState: {"e_g": "accumulated_grads", "e_x": "accumulated_delta_vars"}
    },
    K.Lion: {optax.ScaleByLionState: {"mu": "momentums"}},
}


def slot_fields(optimizer: Any, opt_state: PyTree) -> dict[type, dict[str, str]]:
    """Returns the optax states that hold slots of a Keras optimizer.

    Returns:
      For each class of states the Keras slots by the names of the fields that hold them.
    """
    fields = dict(_SLOT_FIELDS.get(type(optimizer), {}))
    # Keras's momentum includes the learning rate. `optax.trace` includes it only in the chains of
    # `native`, which a KerasCount marks: in `optax.sgd` it comes before the learning rate.
    if not _tree.nodes(opt_state, KerasCount):
        fields.pop(optax.TraceState, None)
        # Adamax's state in optax has the class of Adam's, which holds other values.
        if type(optimizer) is K.Adamax:
            fields.clear()
    return fields
