"""A second, unbuilt instance of a Keras optimizer: the one that was passed in stays as it is."""

from collections.abc import Callable
from typing import Any

import keras

from bridge import keras_private
from bridge.optim._schedules import require_no_optax_schedule


def copied(optimizer: Any, stand_in_of: Callable[[Any], Any | None]) -> Any:
    """Returns an unbuilt optimizer of the same class and settings, with a learning rate as it is.

    Loss scaling is left out but for `LossScaleOptimizer`: see `bridge.optimizer`.

    Args:
      optimizer: A Keras optimizer, built or not.
      stand_in_of: Returns what stands for a variable that is excluded from weight decay, if known.

    Raises:
      ValueError: Its settings do not say all of it: variables are excluded from weight decay by
        identity and `stand_in_of` does not know them.
    """
    if isinstance(optimizer, keras.optimizers.LossScaleOptimizer):
        return type(optimizer)(
            copied(optimizer.inner_optimizer, stand_in_of),
            initial_scale=optimizer.initial_scale,
            dynamic_growth_steps=optimizer.dynamic_growth_steps,
            name=optimizer.name,
        )
    if isinstance(optimizer, keras.optimizers.MultiOptimizer):
        return _copied_multi(optimizer, stand_in_of)
    rate = keras_private.optimizers.learning_rate(optimizer)
    require_no_optax_schedule(rate)
    settings = optimizer.get_config()
    if rate is not None:  # a schedule has no state: both may use it
        settings["learning_rate"] = rate
    settings["loss_scale_factor"] = None
    copy = type(optimizer).from_config(settings)
    _exclude(optimizer, copy, stand_in_of)
    return copy


def _copied_multi(optimizer: Any, stand_in_of: Callable[[Any], Any | None]) -> Any:
    chosen = keras_private.optimizers.optimizer_map(optimizer)
    copies: dict[int, Any] = {}

    def copy_of(inner: Any) -> Any:
        if id(inner) not in copies:
            copies[id(inner)] = copied(inner, stand_in_of)
        return copies[id(inner)]

    if not isinstance(chosen, keras.optimizers.OptimizerMap):
        return type(optimizer)(lambda v: copy_of(chosen(v)), name=optimizer.name)
    by_path = {path: copy_of(chosen[path]) for path in chosen}
    both = keras.optimizers.OptimizerMap(copy_of(chosen.default_optimizer), by_path)
    return type(optimizer)(both, name=optimizer.name)


def _exclude(optimizer: Any, copy: Any, stand_in_of: Callable[[Any], Any | None]) -> None:
    ids, pattern = keras_private.optimizers.excluded_from_weight_decay(optimizer)
    if not ids and not pattern:
        return
    stand_ins = [stand_in_of(i) for i in ids]
    if any(v is None for v in stand_ins):
        raise ValueError(
            f"optimizer {optimizer.name!r} excludes variables from weight decay by identity "
            "(exclude_from_weight_decay(var_list=...)), and they are not known here. Pass their "
            "model, bridge.optimizer(optimizer, model=model), or exclude by name: var_names=[...]."
        )
    copy.exclude_from_weight_decay(var_list=stand_ins, var_names=[pattern] if pattern else None)
