"""Learning rate schedules, from Keras to optax and from optax to Keras."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import keras

from bridge.model._functions import find_function, name_of
from bridge.optim import _plain_data
from functrain.internal import require


def schedule(schedule: Callable[..., Any], /, **arguments: Any) -> Callable[..., Any]:
    """Returns a Keras schedule as an optax one, or an optax schedule as a Keras one.

    Both kinds count the updates made so far, starting with 0, and the values are those that the
    given schedule computes.

    Args:
      schedule: A `keras.optimizers.schedules.LearningRateSchedule`; or a function
        ``(count i32[]) -> f32[]``; or, together with arguments, a function that creates one, such
        as `optax.cosine_decay_schedule`. In the last form, a model that uses the schedule can be
        saved if the function is optax's or registered with
        `keras.saving.register_keras_serializable`.
      **arguments: Arguments of the function that creates an optax schedule.

    Returns:
      For a Keras schedule a pure function ``(count i32[]) -> f32[]``, otherwise a Keras schedule.

    Raises:
      TypeError: `schedule` is not a schedule.

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
        expected = "no arguments for a Keras schedule"
        require(not arguments, "schedule", expected, sorted(arguments), error=TypeError)
        # A schedule that was converted from optax before is converted back exactly.
        if isinstance(schedule, OptaxSchedule):
            return schedule.optax_schedule
        return lambda count: jnp.asarray(schedule(count), jnp.float32)
    expected = "a schedule of Keras or optax, or a function that creates one and its arguments"
    advice = "A constant is optax.constant_schedule(value)."
    require(callable(schedule), "schedule", expected, schedule, advice, error=TypeError)
    keras_schedule = OptaxSchedule(schedule, arguments)
    # Fails at once for `schedule(optax.cosine_decay_schedule)`, in which the arguments are missing.
    jax.eval_shape(keras_schedule, 0)
    return keras_schedule


@keras.saving.register_keras_serializable(package="bridge")
class OptaxSchedule(keras.optimizers.schedules.LearningRateSchedule):  # type: ignore[misc]
    """An optax schedule as a Keras schedule.

    Args:
      function: The schedule, or if there are arguments, the function that creates it.
      arguments: Keyword arguments of `function`.
    """

    def __init__(self, function: Callable[..., Any], arguments: dict[str, Any]) -> None:
        self._function = function
        self._arguments = arguments
        self.optax_schedule = function(**arguments) if arguments else function

    def __call__(self, step: Any) -> jax.Array:
        """Returns the learning rate after `step` updates."""
        count = keras.ops.convert_to_tensor(step)
        return jnp.asarray(self.optax_schedule(count), jnp.float32)

    def get_config(self) -> dict[str, Any]:
        """Returns the schedule as plain data for a file.

        Raises:
          ValueError: The function has no name that a file can contain.
        """
        return {
            "function": name_of(self._function, "bridge.schedule"),
            "arguments": _plain_data.encode(self._arguments, "bridge.schedule"),
        }

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> "OptaxSchedule":
        """Returns the schedule that `get_config` described."""
        arguments = _plain_data.decode(config["arguments"])
        return cls(find_function(config["function"]), arguments)
