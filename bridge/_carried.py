"""Metrics that a layer updates inside its `call`, carried through Keras's own steps."""

import contextlib
from collections.abc import Iterator
from typing import Any

import keras

from bridge import _keras_private


@contextlib.contextmanager
def carried(model: keras.Model, metrics: list[Any]) -> Iterator[None]:
    """Makes updates of metrics in `call` part of the step that is being traced.

    Keras's steps hand only weights to the forward pass, so that such an update ends in an error
    or in nothing. Here the forward pass reads the metrics' values from the state, and the loss,
    which runs next in the same trace, is given the new ones.

    Args:
      model: The compiled model. Nothing is touched where no layer holds a metric of its own.
      metrics: The values of `model.metrics_variables` before the step.
    """
    known = model.metrics_variables
    held = {id(v) for metric in _held(model) for v in metric.variables}
    pairs = [(v, x) for v, x in zip(known, metrics, strict=True) if id(v) in held]
    if not pairs:
        yield
        return
    found: dict[int, Any] = {}
    call, compute_loss = model.stateless_call, model.stateless_compute_loss

    def stateless_call(*args: Any, **kwargs: Any) -> Any:
        with _lent(pairs), _recorded([v for v, _ in pairs], found):
            return call(*args, **kwargs)

    def stateless_compute_loss(first: Any, second: Any, values: Any, **kwargs: Any) -> Any:
        new = [found.pop(id(v), x) for v, x in zip(known, values, strict=True)]
        return compute_loss(first, second, new, **kwargs)

    own = {"stateless_call": stateless_call, "stateless_compute_loss": stateless_compute_loss}
    with _replaced(model, own):
        yield


def _held(layer: keras.Layer) -> Iterator[Any]:
    """Yields the metrics that layers hold themselves."""
    yield from _keras_private.own_metrics(layer)
    for below in _keras_private.sublayers(layer):
        yield from _held(below)


@contextlib.contextmanager
def _lent(pairs: list[tuple[Any, Any]]) -> Iterator[None]:
    """Gives variables other values for a while."""
    before = [_keras_private.lend(variable, value) for variable, value in pairs]
    try:
        yield
    finally:
        for (variable, _), value in zip(pairs, before, strict=True):
            _keras_private.lend(variable, value)


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
