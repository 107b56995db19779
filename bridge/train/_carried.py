"""Metrics that a layer updates inside its `call`, carried through Keras's own steps."""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any, TypeAlias

import keras

from bridge import keras_private

Variables: TypeAlias = list[Any]
Merge: TypeAlias = Callable[[Variables, Variables], tuple[Variables, Variables]]


@contextlib.contextmanager
def carry_metrics(model: keras.Model, metrics: Variables) -> Iterator[Merge]:
    """Context manager: makes updates of metrics in `call` part of the step that is being traced.

    Keras's steps pass only weights to the forward pass, so that such an update raises an error or
    is lost. Here the forward pass reads the metrics' values from the state, and appends the new
    ones to the non-trainable values that it returns. The step passes these to Keras's loss or to
    another forward pass, or returns them if it is a user's step that computes its own loss.

    Args:
      model: The compiled model. Nothing is changed if no layer holds a metric.
      metrics: The values of `model.metrics_variables` before the step.

    Yields:
      ``merge(non_trainable, metrics) -> (non_trainable, metrics)``, for what the step returns.
    """
    layer_ids: set[int] = set()
    for layer in keras_private.layers.all_layers(model):
        for metric in keras_private.layers.own_metrics(layer):
            layer_ids.update(map(id, metric.variables))
    pairs = zip(model.metrics_variables, metrics, strict=True)
    layer_pairs = [(v, x) for v, x in pairs if id(v) in layer_ids]
    if not layer_pairs:
        yield lambda non_trainable, metrics: (non_trainable, metrics)
        return
    updates = _Updates(model, layer_pairs)
    # Keras's train_step and test_step look these two methods up on the model.
    methods = {"stateless_call": updates.call, "stateless_compute_loss": updates.compute_loss}
    with _replace_methods(model, methods):
        yield lambda non_trainable, values: updates.merge(non_trainable, values, before=metrics)


class _Updates:
    """Replacements of the two methods that a step calls, which carry the metrics between them."""

    def __init__(self, model: keras.Model, pairs: list[tuple[Any, Any]]) -> None:
        self._metrics_variables = model.metrics_variables
        self._variables, self._values = map(list, zip(*pairs, strict=True))
        self._non_trainable_count = len(model.non_trainable_variables)
        self._call, self._compute_loss = model.stateless_call, model.stateless_compute_loss
        self._updated_ids: set[int] = set()

    def call(
        self, trainable_variables: Any, non_trainable_variables: Any, *args: Any, **kwargs: Any
    ) -> Any:
        """Calls the model, and appends new values of metrics to the non-trainable values."""
        non_trainable, carried = self._split(non_trainable_variables)
        assigned: dict[int, Any] = {}
        # A second forward pass in one step continues from the values of the first.
        pairs = list(zip(self._variables, carried or self._values, strict=True))
        new_values = keras_private.variables.temporary_values(pairs)
        with new_values, _record_assignments(self._variables, assigned):
            results = self._call(trainable_variables, non_trainable, *args, **kwargs)
        y, non_trainable, *losses = results
        if assigned or carried:
            self._updated_ids |= assigned.keys()
            values = [assigned.get(id(variable), value) for variable, value in pairs]
            non_trainable = [*non_trainable, *values]
        return (y, non_trainable, *losses)

    def compute_loss(
        self,
        trainable_variables: Any,
        non_trainable_variables: Any,
        metrics_variables: Any,
        **kwargs: Any,
    ) -> Any:
        """Computes the loss with the metrics as the forward pass left them."""
        non_trainable, metrics = self.merge(non_trainable_variables, metrics_variables)
        return self._compute_loss(trainable_variables, non_trainable, metrics, **kwargs)

    def merge(
        self, non_trainable: Variables, metrics: Variables, before: Variables | None = None
    ) -> tuple[Variables, Variables]:
        """Moves the values of metrics from the end of the non-trainable values to `metrics`.

        Args:
          non_trainable: The non-trainable values, with or without values of metrics behind them.
          metrics: The values of `model.metrics_variables`.
          before: Values of the metrics before the step. A metric that has another value in
            `metrics` was set by the step itself, and keeps that value.
        """
        non_trainable, carried = self._split(non_trainable)
        carried_by_id = dict(zip(map(id, self._variables), carried, strict=bool(carried)))
        merged: Variables = []
        triples = zip(self._metrics_variables, metrics, before or metrics, strict=True)
        for variable, value, old_value in triples:
            is_carried = id(variable) in self._updated_ids and value is old_value
            merged.append(carried_by_id.get(id(variable), value) if is_carried else value)
        return non_trainable, merged

    def _split(self, non_trainable: Variables) -> tuple[Variables, Variables]:
        """Returns the model's non-trainable values, and the values of metrics behind them."""
        values = list(non_trainable)
        return values[: self._non_trainable_count], values[self._non_trainable_count :]


@contextlib.contextmanager
def _record_assignments(variables: list[Any], assigned: dict[int, Any]) -> Iterator[None]:
    """Context manager: stores each value that is assigned to a variable, by the variable's id."""
    with contextlib.ExitStack() as stack:
        for variable in variables:

            def assign(value: Any, variable: Any = variable, assign: Any = variable.assign) -> Any:
                result = assign(value)
                # Keras's StatelessScope may have cast the value: it is read back from there.
                assigned[id(variable)] = variable.value
                return result

            stack.enter_context(_replace_methods(variable, {"assign": assign}))
        yield


@contextlib.contextmanager
def _replace_methods(owner: Any, methods: dict[str, Any]) -> Iterator[None]:
    """Context manager: replaces methods of one object, without Keras's tracking of attributes."""
    # A user may have replaced a method of this object before.
    old_methods = {name: vars(owner)[name] for name in methods if name in vars(owner)}
    vars(owner).update(methods)
    try:
        yield
    finally:
        for name in methods:
            del vars(owner)[name]
        vars(owner).update(old_methods)
