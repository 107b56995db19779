"""What was compiled for a model, kept for as long as the model stays the same."""

from collections.abc import Callable
from typing import Any, TypeVar

import keras

from bridge import keras_private

T = TypeVar("T")


def kept(model: keras.Model, name: str, make: Callable[[], T]) -> T:
    """Returns what `make` made for a model, the same for as long as the model stays the same.

    It is kept in the model itself, so that both are free to go together.
    """
    now = _fingerprint(model)
    all_kept = vars(model).setdefault("_bridge_kept", {})
    known = all_kept.get(name)
    if known is None or not _same(known[0], now):
        all_kept[name] = known = (now, make())
    found: T = known[1]
    return found


def _fingerprint(model: keras.Model) -> list[Any]:
    """Everything that a compiled step has looked at, but for the values of variables."""
    chosen = getattr(model, "optimizer", None)  # a model that was not compiled may lack it
    optimizer = chosen.variables if chosen is not None else []
    lists = (
        model.trainable_variables,
        model.non_trainable_variables,
        optimizer,
        model.metrics_variables,
        model.metrics,
    )
    parts = [v for variables in lists for v in (*variables, None)]
    own = [vars(model).get(name) for name in ("train_step", "test_step", "predict_step")]
    return [*keras_private.compiled_parts(model), *own, type(model).train_step, *parts]


def _same(a: list[Any], b: list[Any]) -> bool:
    return len(a) == len(b) and all(x is y for x, y in zip(a, b, strict=True))
