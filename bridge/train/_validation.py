"""Data to evaluate on that no evaluation can take, found before the first step of training."""

from typing import Any

import jax
import keras
import numpy as np

from bridge import keras_private
from bridge.state._keras_state import originals
from bridge.train._checks import refuse_texts
from bridge.train._feed import source
from bridge.train._steps import KerasStep, described
from functrain.internal import PyTree


def require_validation(
    model: keras.Model, data: Any, training: Any, batch_size: Any, steps: Any
) -> None:
    """Refuses arrays to evaluate on which the model's test_step cannot take.

    Arrays only: what else there is might be used up by looking at it. Where a batch of them looks
    as one of the training data, nothing more is done; else a step is traced.

    Args:
      model: A compiled model, built as far as the training data go.
      data: What `fit` got as `validation_data`.
      training: x, y and sample_weight of training.
      batch_size: Examples per step of an evaluation, or None.
      steps: Steps per evaluation, or None.

    Raises:
      ValueError: There is no batch, the step cannot be traced, or what Keras raises.
    """
    if isinstance(data, tuple | list) and not 1 <= len(data) <= 3:
        raise ValueError(
            "validation_data: expected (x, y), (x, y, sample_weight) or what yields batches of "
            f"these, got a {type(data).__name__} of length {len(data)}"
        )
    validation = keras.utils.unpack_x_y_sample_weight(data)
    refuse_texts(**{"validation_data's x": validation[0], "validation_data's y": validation[1]})
    if not _are_arrays(validation):
        return
    if not jax.tree.leaves(validation[0]):
        raise ValueError(f"validation_data: expected (x, y) of arrays, got x={validation[0]!r}")
    try:
        # Finds lengths that differ, and that there is no batch at all.
        source(model, validation, batch_size, steps, trains=False)
    except ValueError as error:
        raise ValueError(f"validation_data: {error}") from error
    batch = _batch(validation, batch_size)
    expected = _batch(training, batch_size) if _are_arrays(training) else None
    compiles = model.jit_compile and not model.run_eagerly
    placed = keras.distribution.distribution() is not None
    if _looks(batch) != _looks(expected) and compiles and not placed:
        _require_traced(model, batch, expected)


def _are_arrays(data: Any) -> bool:
    leaves = [x for x in keras.tree.flatten(data) if x is not None]
    return all(
        isinstance(x, np.ndarray | jax.Array) and x.ndim > 0 and x.dtype.kind in "biufV"
        for x in leaves
    )


def _batch(arrays: Any, size: int | None) -> PyTree:
    """Returns what a first batch looks like to a step."""

    def first(x: Any) -> jax.ShapeDtypeStruct:
        rows = min(size or 32, len(x))
        dtype = keras.config.floatx() if x.dtype.kind == "f" else x.dtype
        return jax.ShapeDtypeStruct((rows, *x.shape[1:]), jax.dtypes.canonicalize_dtype(dtype))

    return jax.tree.map(first, tuple(arrays))


def _looks(batch: PyTree) -> Any:
    leaves = [(leaf.shape[1:], leaf.dtype) for leaf in jax.tree.leaves(batch)]
    return jax.tree.structure(batch), leaves


def _require_traced(model: keras.Model, batch: PyTree, expected: PyTree) -> None:
    data = keras.utils.pack_x_y_sample_weight(*batch)
    try:
        jax.eval_shape(KerasStep(model, trains=False), originals(model), data)
    except Exception as error:
        known = f", as training has {described(expected)}" if expected is not None else ""
        got = described(batch)
        raise ValueError(
            f"validation_data: expected what the model can evaluate{known}; got {got}. "
            f"No step was taken. Its test_step says:\n{error}"
        ) from error
    finally:
        keras_private.layers.forget_losses(model)
