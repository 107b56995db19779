"""Learning rate schedules, from Keras to optax and from optax to Keras."""

import inspect
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import keras

from bridge.model._plain_data import PlainData

FILES = PlainData(
    namespaces=("optax", "optax.contrib"),
    advice="Nor can any other function made inside a function, nor what holds one. Pass what makes "
    "it and its arguments, bridge.OptaxOptimizer(optax.adam, learning_rate=1e-3) or "
    "bridge.schedule(optax.linear_schedule, init_value=1.0); or put all of it into a function of "
    'yours with @keras.saving.register_keras_serializable("my_package") above it, and pass that. '
    "Weights alone (save_weights) can be saved as it is.",
)
_TAKES = (
    "schedule: expected a function of the count, or what makes one with its arguments by name, "
    "schedule(optax.cosine_decay_schedule, init_value=0.1, decay_steps=100)"
)


def schedule(schedule: Callable[..., Any], /, **arguments: Any) -> Callable[..., Any]:
    """Returns a Keras schedule as an optax one, or an optax schedule as a Keras one.

    Both count the updates made so far from 0, and every value is the one that the schedule itself
    computes: 0 apart over 1 000 steps for all of Keras's and all of optax's, boundaries included.
    Those who write one out in the other's words: `CosineDecay` with a warm-up is optax's
    `warmup_cosine_decay_schedule` with `decay_steps` = warm-up + Keras's `decay_steps`; the
    boundaries of `PiecewiseConstantDecay` are optax's less 1.

    Args:
      schedule: A `keras.optimizers.schedules.LearningRateSchedule`; or a function
        ``(count i32[]) -> f32[]``; or, with arguments, a function that makes one, such as
        `optax.cosine_decay_schedule`. A model that trains by the last can be saved, where the
        function is optax's or registered with `keras.saving.register_keras_serializable`.
      **arguments: For the function that makes an optax schedule.

    Returns:
      For a Keras schedule a pure function ``(count i32[]) -> f32[]``, else a Keras schedule.

    Raises:
      TypeError: `schedule` is no schedule.

    Examples:
      >>> import keras, optax
      >>> halves = keras.optimizers.schedules.ExponentialDecay(1.0, 10, 0.5)
      >>> print(schedule(halves)(20))
      0.25
      >>> tx = optax.sgd(schedule(halves))
      >>> cosine = schedule(optax.cosine_decay_schedule, init_value=0.5, decay_steps=100)
      >>> optimizer = keras.optimizers.Adam(cosine)
      >>> float(optimizer.learning_rate)
      0.5
    """
    if isinstance(schedule, keras.optimizers.schedules.LearningRateSchedule):
        if arguments:
            raise TypeError(f"a Keras schedule takes no arguments here, got {sorted(arguments)}")
        if isinstance(schedule, OptaxSchedule):
            return schedule.optax_schedule
        return lambda count: jnp.asarray(schedule(count), jnp.float32)
    if not callable(schedule):
        raise TypeError(
            "schedule: expected a keras.optimizers.schedules.LearningRateSchedule or an optax "
            f"schedule, a function of the count, got {schedule!r}. A constant is "
            "optax.constant_schedule(value)."
        )
    if arguments:
        require_takes(schedule, _TAKES, **arguments)
    made = OptaxSchedule(schedule, arguments)
    require_takes(made.optax_schedule, _TAKES, 0)
    return made


@keras.saving.register_keras_serializable(package="bridge")
class OptaxSchedule(keras.optimizers.schedules.LearningRateSchedule):  # type: ignore[misc]
    """An optax schedule as Keras sees it.

    Args:
      function: The schedule; or what makes it, if there are arguments.
      arguments: Keyword arguments for `function`.
    """

    def __init__(self, function: Callable[..., Any], arguments: dict[str, Any]) -> None:
        self._function = function
        self._arguments = arguments
        self.optax_schedule = function(**arguments) if arguments else function

    def __call__(self, step: Any) -> jax.Array:
        """Returns the learning rate after so many updates."""
        count = keras.ops.convert_to_tensor(step)
        return jnp.asarray(self.optax_schedule(count), jnp.float32)

    def get_config(self) -> dict[str, Any]:
        """Returns names and numbers only."""
        return {
            "function": FILES.name_of(self._function, "bridge.schedule"),
            "arguments": FILES.encode_arguments(self._arguments, "bridge.schedule"),
        }

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> "OptaxSchedule":
        """Returns the schedule that `get_config` described."""
        return cls(FILES.named(config["function"]), FILES.decode_arguments(config["arguments"]))


def require_takes(function: Any, expected: str, *args: Any, **arguments: Any) -> None:
    """Refuses a function that cannot be called so; says what was expected instead.

    Raises:
      TypeError: The arguments do not fit its signature.
    """
    try:
        inspect.signature(function).bind(*args, **arguments)
    except TypeError as error:
        raise TypeError(
            f"{expected}, got {function!r} with {sorted(arguments) or 'no arguments'}: {error}."
        ) from None
    except ValueError:
        return  # a function of another language may have no signature
