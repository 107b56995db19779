"""Metrics that a layer updates inside its `call`, carried through Keras's own steps."""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any, TypeAlias

import keras

from bridge import keras_private

Variables: TypeAlias = list[Any]
Merge: TypeAlias = Callable[[Variables, Variables], tuple[Variables, Variables]]


@contextlib.contextmanager
def carried(model: keras.Model, metrics: Variables) -> Iterator[Merge]:
    """Makes updates of metrics in `call` part of the step that is being traced.

    Keras's steps hand only weights to the forward pass, so that such an update ends in an error
    or in nothing. Here the forward pass reads the metrics' values from the state, and the new ones
    travel behind the non-trainable values that it returns: to the loss, to another forward pass,
    or out of a step of the user's own that calls `stateless_call` and no loss of Keras's.

    Args:
      model: The compiled model. Nothing is touched where no layer holds a metric of its own.
      metrics: The values of `model.metrics_variables` before the step.

    Yields:
      ``merge(non_trainable, metrics) -> (non_trainable, metrics)``, for what the step returns.
    """
    known = model.metrics_variables
    layers = keras_private.layers.all_layers(model)
    inside = [metric for layer in layers for metric in keras_private.layers.own_metrics(layer)]
    held = {id(v) for metric in inside for v in metric.variables}
    pairs = [(v, x) for v, x in zip(known, metrics, strict=True) if id(v) in held]
    if not pairs:
        yield lambda non_trainable, metrics: (non_trainable, metrics)
        return
    updates = _Updates(model, pairs)
    methods = {"stateless_call": updates.call, "stateless_compute_loss": updates.compute_loss}
    with _replaced(model, methods):
        yield lambda rest, values: updates.merge(rest, values, before=metrics)


class _Updates:
    """The two methods that a step calls, and what becomes of metrics in between."""

    def __init__(self, model: keras.Model, pairs: list[tuple[Any, Any]]) -> None:
        self._known = model.metrics_variables
        self._variables = [v for v, _ in pairs]
        self._values = [x for _, x in pairs]
        self._n = len(model.non_trainable_variables)
        self._call, self._compute_loss = model.stateless_call, model.stateless_compute_loss
        self._updated: set[int] = set()

    def call(
        self, trainable_variables: Any, non_trainable_variables: Any, *args: Any, **kwargs: Any
    ) -> Any:
        """The forward pass, which leaves new values of metrics behind the non-trainable ones."""
        rest, now = self._parted(non_trainable_variables)
        found: dict[int, Any] = {}
        pairs = list(zip(self._variables, now or self._values, strict=True))
        with keras_private.variables.temporary_values(pairs), _recorded(self._variables, found):
            y, rest, *losses = self._call(trainable_variables, rest, *args, **kwargs)
        if not found and not now:
            return (y, rest, *losses)
        self._updated |= found.keys()
        return (y, [*rest, *(found.get(id(v), x) for v, x in pairs)], *losses)

    def compute_loss(
        self,
        trainable_variables: Any,
        non_trainable_variables: Any,
        metrics_variables: Any,
        **kwargs: Any,
    ) -> Any:
        """The loss, which is given the metrics as the forward pass left them."""
        rest, metrics = self.merge(non_trainable_variables, metrics_variables)
        return self._compute_loss(trainable_variables, rest, metrics, **kwargs)

    def merge(
        self, non_trainable: Variables, metrics: Variables, before: Variables | None = None
    ) -> tuple[Variables, Variables]:
        """Parts non-trainable values from those of metrics, and puts these where they belong.

        Where `before` is given, a metric that is another value by now was set by the step.
        """
        rest, now = self._parted(non_trainable)
        new = {id(v): x for v, x in zip(self._variables, now, strict=bool(now))}
        taken = self._updated & new.keys()
        if before is not None:
            olds = zip(self._known, metrics, before, strict=True)
            taken -= {id(v) for v, x, old in olds if x is not old}
        pairs = zip(self._known, metrics, strict=True)
        return rest, [new[id(v)] if id(v) in taken else x for v, x in pairs]

    def _parted(self, non_trainable: Variables) -> tuple[Variables, Variables]:
        values = list(non_trainable)
        return values[: self._n], values[self._n :]


@contextlib.contextmanager
def _recorded(variables: list[Any], found: dict[int, Any]) -> Iterator[None]:
    """Notes what is assigned to variables, by id."""
    with contextlib.ExitStack() as stack:
        for variable in variables:

            def assign(value: Any, variable: Any = variable, assign: Any = variable.assign) -> Any:
                result = assign(value)
                found[id(variable)] = variable.value  # as the scope that took it has it
                return result

            stack.enter_context(_replaced(variable, {"assign": assign}))
        yield


@contextlib.contextmanager
def _replaced(owner: Any, methods: dict[str, Any]) -> Iterator[None]:
    """Puts methods into one object, past Keras's tracking of attributes, for a while."""
    before = {name: vars(owner)[name] for name in methods if name in vars(owner)}
    vars(owner).update(methods)
    try:
        yield
    finally:
        for name in methods:
            del vars(owner)[name]
        vars(owner).update(before)
