"""Keras optimizers in optax's own pieces, where those say the same."""

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
from functrain.internal import PyTree
from functrain.internal import tree as _tree

K = keras.optimizers


class KerasCount(NamedTuple):
    """Counts updates, and marks a chain whose states mean what Keras's slots mean."""

    iterations: jax.Array


def native(optimizer: Any) -> optax.GradientTransformation | None:
    """Returns a Keras optimizer in pieces of optax, or None where optax has none that fit."""
    make = _MAKERS.get(type(optimizer))
    core = make(optimizer) if make and _is_plain(optimizer) else None
    if core is None:
        return None
    decay = [] if optimizer.weight_decay is None else [_decay(optimizer)]
    rate = keras_private.optimizers.learning_rate(optimizer)
    before, after = core
    if after and decay:  # it would be in the momentum, which Keras's is not
        return None
    scale = optax.scale_by_learning_rate(
        float(optimizer.learning_rate) if rate is None else schedule(rate)
    )
    return optax.chain(*_clip(optimizer), *before, *decay, scale, *after, _count())


def _is_plain(optimizer: Any) -> bool:
    """Whether it has no feature that optax has no piece for."""
    rate = keras_private.optimizers.learning_rate(optimizer)
    by_function = rate is not None and not isinstance(rate, K.schedules.LearningRateSchedule)
    ids, _ = keras_private.optimizers.excluded_from_weight_decay(optimizer)
    accumulates = optimizer.gradient_accumulation_steps
    return not (by_function or ids or optimizer.use_ema or accumulates)


def _clip(optimizer: Any) -> list[optax.GradientTransformation]:
    if optimizer.clipnorm:
        return [clip_each_by_norm(optimizer.clipnorm)]
    if optimizer.global_clipnorm:
        return [optax.clip_by_global_norm(optimizer.global_clipnorm)]
    return [optax.clip(optimizer.clipvalue)] if optimizer.clipvalue else []


def clip_each_by_norm(most: float) -> optax.GradientTransformation:
    """Scales each array down to an L2 norm of at most this."""

    def clipped(g: jax.Array, _: Any) -> jax.Array:
        norm = jnp.sqrt(jnp.sum(jnp.square(g)))
        return g * most / jnp.maximum(norm, most).astype(g.dtype)

    return optax.stateless_with_tree_map(clipped)


def _decay(optimizer: Any) -> optax.GradientTransformation:
    _, pattern = keras_private.optimizers.excluded_from_weight_decay(optimizer)

    def is_decayed(path: Any, _: Any) -> bool:
        name = jax.tree_util.keystr(path[-1:], simple=True)
        return not (pattern and re.search(pattern, name))

    mask = functools.partial(jax.tree_util.tree_map_with_path, is_decayed)
    return optax.add_decayed_weights(optimizer.weight_decay, mask)


def _count() -> optax.GradientTransformation:
    def update(updates: PyTree, state: KerasCount, params: PyTree = None) -> Any:
        del params
        return updates, KerasCount(optax.safe_increment(state.iterations))

    return optax.GradientTransformation(lambda params: KerasCount(jnp.zeros((), jnp.int32)), update)


def scale_by_keras_adam(b1: float, b2: float, eps: float) -> optax.GradientTransformation:
    """As `optax.scale_by_adam`, with eps added to the root of the second moment as it is.

    Optax corrects the second moment first, so that its eps counts for more in early steps.
    """

    def update(grads: PyTree, state: optax.ScaleByAdamState, params: PyTree = None) -> Any:
        del params
        count = optax.safe_increment(state.count)
        mu = jax.tree.map(lambda m, g: m + (g - m) * (1 - b1), state.mu, grads)
        nu = jax.tree.map(lambda v, g: v + (jnp.square(g) - v) * (1 - b2), state.nu, grads)

        def scaled(m: jax.Array, v: jax.Array) -> jax.Array:
            t = count.astype(m.dtype)
            p1, p2 = (jnp.power(jnp.asarray(b, m.dtype), t) for b in (b1, b2))
            return m * (jnp.sqrt(1 - p2) / (1 - p1)) / (jnp.sqrt(v) + eps)

        return jax.tree.map(scaled, mu, nu), optax.ScaleByAdamState(count, mu, nu)

    return optax.GradientTransformation(optax.scale_by_adam(b1, b2).init, update)


Core: TypeAlias = tuple[list[optax.GradientTransformation], list[optax.GradientTransformation]]


def _adam(o: Any) -> Core | None:
    return None if o.amsgrad else ([scale_by_keras_adam(o.beta_1, o.beta_2, o.epsilon)], [])


def _rmsprop(o: Any) -> Core | None:
    if o.centered:
        return None
    # The momentum of Keras's RMSprop, unlike that of its SGD, is subtracted from the params.
    negate = optax.scale(-1.0)
    momentum = [negate, optax.trace(o.momentum), negate] if o.momentum else []
    return [optax.scale_by_rms(o.rho, o.epsilon, eps_in_sqrt=True)], momentum


def _lamb(o: Any) -> Core | None:
    if o.weight_decay is not None:  # Keras takes the norm after the decay
        return None
    return [optax.scale_by_adam(o.beta_1, o.beta_2, o.epsilon), optax.scale_by_trust_ratio()], []


_MAKERS: dict[type, Callable[[Any], Core | None]] = {
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


# Which fields of which states of optax hold which slots of Keras.
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
    """Returns which states of optax hold which slots of an optimizer, by the names of fields.

    A trace holds the learning rate, as Keras's momentum does, in chains of `native` only.
    """
    known = _SLOT_FIELDS.get(type(optimizer), {})
    if _tree.nodes(opt_state, KerasCount):
        return known
    return {cls: of for cls, of in known.items() if cls is not optax.TraceState}
