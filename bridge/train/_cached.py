"""What was compiled for a model, cached for as long as the model stays the same."""

import weakref
from collections.abc import Callable
from typing import Any, TypeVar

import keras

from bridge import keras_private

T = TypeVar("T")
_Reference = Callable[[], Any]


def cached_for(model: keras.Model, name: str, make: Callable[[], T]) -> T:
    """Returns what `make` made for a model, the same for as long as the model stays the same.

    It lies in the model itself, so that both are free to go together; and it goes as soon as the
    optimizer, say, that it was compiled for is no longer in use.
    """
    cache = vars(model).setdefault("_bridge_cache", {})
    now = _dependencies(model)
    known = cache.get(name)
    if known is None or not _same(known[0], now):

        def forget(_: Any) -> None:
            if cache.get(name) is known:
                del cache[name]

        cache[name] = known = ([_reference(x, forget) for x in now], make())
    found: T = known[1]
    return found


def _dependencies(model: keras.Model) -> list[Any]:
    """Everything that a compiled step has looked at, but for the values of variables."""
    chosen = getattr(model, "optimizer", None)  # a model that was not compiled may lack it
    lists = (
        model.trainable_variables,
        model.non_trainable_variables,
        chosen.variables if chosen is not None else [],
        model.metrics_variables,
        model.metrics,
    )
    parts = [v for variables in lists for v in (*variables, None)]
    own = [vars(model).get(name) for name in ("train_step", "test_step", "predict_step")]
    return [*keras_private.trainer.compiled_parts(model), *own, type(model).train_step, *parts]


def _reference(x: Any, forget: Callable[[Any], None]) -> _Reference:
    """Returns a function that returns `x`, without keeping it alive where that is possible."""
    try:
        return weakref.ref(x, forget)
    except TypeError:  # None, among others
        return lambda: x


def _same(references: list[_Reference], now: list[Any]) -> bool:
    pairs = zip(references, now, strict=False)
    return len(references) == len(now) and all(reference() is x for reference, x in pairs)
