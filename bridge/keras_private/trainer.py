"""What `compile` made of a model, and what its epochs report."""

from collections.abc import Iterator
from typing import Any

import keras
from keras.src.backend.jax.trainer import JAXTrainer

from bridge.keras_private.optimizers import all_or_nothing


def is_trainer(model: Any) -> bool:
    """Whether something has Keras's train_step, fit and so on: a keras.Model, or its like.

    Names `JAXTrainer`; checked with Keras 3.15.1. A layer with a trainer mixed in, which Keras
    takes for a model, is no keras.Model.
    """
    return isinstance(model, JAXTrainer)


def build(model: keras.Model, batch: Any) -> None:
    """Builds a model and its compiled loss, metrics and optimizer for batches like this one.

    Calls `Trainer._symbolic_build`; checked with Keras 3.15.1. Without it compiled metrics have
    no variables before the first `fit`, and a state made before that lacks them.
    """
    with all_or_nothing(getattr(model, "optimizer", None)):
        model._symbolic_build(data_batch=batch)


def build_from(model: keras.Model, iterator: Any) -> None:
    """As `build`, for the first batch of `epochs`, which is then at its start again.

    Calls `Trainer._symbolic_build`, which asks for that batch only where something is not built:
    a generator loses no batch otherwise. Checked with Keras 3.15.1.
    """

    def batches() -> Iterator[Any]:
        for begin, end, items in iterator:
            yield begin, end, (item.arrays() for item in items)

    with all_or_nothing(getattr(model, "optimizer", None)):
        model._symbolic_build(iterator=batches())
    iterator.reset()


def is_built(model: keras.Model) -> bool:
    """Whether nothing of a compiled model is left for its first batch to build.

    Reads `Trainer._compile_metrics` and `Trainer._compile_loss`; checked with Keras 3.15.1.
    Without it a state with missing metrics cannot be told from a whole one.
    """
    parts = (model, model._compile_metrics, model._compile_loss, model.optimizer)
    return all(part is None or part.built for part in parts)


def compiled_parts(model: keras.Model) -> list[Any]:
    """Returns what `compile` made: other objects mean that a compiled step is out of date.

    Reads `Trainer._compile_loss`, `_compile_metrics` and `_loss_tracker`; checked with Keras
    3.15.1. Without it a step compiled before `model.compile` would run after it.
    """
    names = ("_compile_loss", "_compile_metrics", "_loss_tracker", "optimizer")
    return [getattr(model, name, None) for name in names]


def initial_epoch(model: keras.Model) -> int | None:
    """Returns the epoch that BackupAndRestore found, which wins over `initial_epoch`.

    Reads `Trainer._initial_epoch`; checked with Keras 3.15.1.
    """
    epoch: int | None = model._initial_epoch
    return epoch


def epoch_logs(model: keras.Model, logs: Any) -> dict[str, Any]:
    """Returns the model's metrics, or the logs where a step reports something else.

    Calls `Trainer._get_metrics_result_or_logs`; checked with Keras 3.15.1. Without it History
    lacks what Keras writes where a model has its own `train_step` or `metrics`.
    """
    return dict(model._get_metrics_result_or_logs(logs))


def in_order(model: keras.Model, logs: dict[str, Any]) -> Any:
    """Returns logs as the list, or the scalar, that `evaluate` returns.

    Calls `Trainer._flatten_metrics_in_order`; checked with Keras 3.15.1.
    """
    return model._flatten_metrics_in_order(logs)
