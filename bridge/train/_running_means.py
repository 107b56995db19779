"""A model's running metrics outside of their variables: reset and read in one program each."""

from typing import Any, TypeAlias

import jax
import keras

from bridge import keras_private
from bridge.train._cached import cached_for
from functrain.internal import jit

Values: TypeAlias = list[jax.Array]


class RunningMeans:
    """The metrics of a model all of whose metrics are Keras's own running means and sums.

    Any other metric may do in Python what a program would do but once, and its result may have
    other last bits in a program: such are reset and read by Keras, one after the other.
    """

    def __init__(self, model: keras.Model) -> None:
        self._model = model
        self._variables = model.metrics_variables
        self.reset = jit(self._reset)
        self.read = jit(self._read)

    @staticmethod
    def of(model: keras.Model) -> "RunningMeans | None":
        """Returns those of a model; None where it has others, or variables on several devices."""
        if model.run_eagerly or keras.distribution.distribution() is not None:
            return None
        plain = keras_private.metrics.only_running_means
        return cached_for(model, "metrics", lambda: RunningMeans(model) if plain(model) else None)

    def values(self) -> Values:
        """Returns what is in the variables."""
        return [v.value for v in self._variables]

    def _reset(self, values: Values) -> Values:
        with self._scope(values) as scope:
            self._model.reset_metrics()
        return [scope.get_current_value(v) for v in self._variables]

    def _read(self, values: Values) -> dict[str, jax.Array]:
        with self._scope(values):
            found: dict[str, jax.Array] = self._model.get_metrics_result()
        return found

    def _scope(self, values: Values) -> Any:
        return keras.StatelessScope(list(zip(self._variables, values, strict=True)))
