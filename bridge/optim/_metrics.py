"""Keras metrics as functrain metrics, whose state is a list of arrays."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import keras

from bridge import keras_private
from bridge.model import _scope
from bridge.optim._losses import entry_of_output
from functrain import Aux
from functrain.internal import PyTree, labels_of, require, require_labels
from functrain.metrics import Metric


def metric(
    keras_metric: Any,
    *,
    weighted: bool = False,
    output: str | int | None = None,
    values: Callable[[PyTree, PyTree], PyTree] | None = None,
    example: tuple[PyTree, PyTree] | None = None,
) -> Metric:
    """Returns a Keras metric as a `functrain.metrics.Metric`.

    Its state is the list of the Keras metric's variables, as arrays, and starts with the values
    that `reset_state` assigns. The variables of the Keras object itself are neither read nor
    written, so several states may use the same object. All three functions work under `jit`,
    `scan` and `vmap`.

    Metrics that use the mask on a model's outputs get it only in evaluation, where they are
    updated in the same trace as the forward pass. In a training step the gradient computation
    removes the mask, in functrain as in Keras's `fit`.

    Args:
      keras_metric: Any metric that `compile` takes: a `keras.metrics.Metric`, a name, or a
        function ``(y_true, y_pred) -> [B, ...]``, whose mean is the metric.
      weighted: Weight as the loss did, by ``Aux.sample_weight``, as `weighted_metrics` do. For a
        loss that does not report its weights, those are the third part of a batch, if it has one.
      output: The key of the output to measure, if a model returns several in a dict or list.
        Labels, and weights if there are several, are selected with the same key.
      values: ``values(outputs, y) -> [B, ...]``, for metrics that take a single argument, such as
        `keras.metrics.Mean` and `Sum`.
      example: ``(outputs, y)``, arrays or `jax.ShapeDtypeStruct`, for metrics that create their
        variables at the first batch (`F1Score`, `R2Score`, `AUC(multi_label=True)`).

    Returns:
      A Metric. Its ``compute`` returns the result of the Keras metric, `f32[]` or a dict. A result
      with one value per class, `f32[C]`, becomes a dict ``{"0": f32[], "1": ...}``.

    Raises:
      ValueError: Keras has no such metric, or the metric needs `example` or `values`.

    Examples:
      >>> import keras, numpy as np
      >>> from functrain import Aux
      >>> auc = metric(keras.metrics.AUC())
      >>> batch = None, np.array([0, 1, 1])
      >>> m = auc.update(auc.init(), batch, Aux(outputs=np.array([0.1, 0.9, 0.8])), None)
      >>> print(auc.compute(m))
      1.0
      >>> accuracy = metric("accuracy", weighted=True)
      >>> batch = None, np.array([0, 1]), np.array([3.0, 1.0])
      >>> aux = Aux(outputs=np.array([[0.9, 0.1], [0.6, 0.4]]))
      >>> print(accuracy.compute(accuracy.update(accuracy.init(), batch, aux, None)))
      0.75
    """
    # Keras chooses the kind of "accuracy" by the shapes. The variables of all kinds are alike.
    is_accuracy = isinstance(keras_metric, str) and keras_metric.lower() in ("accuracy", "acc")
    any_kind = keras.metrics.get("binary_accuracy" if is_accuracy else keras_metric)
    if not isinstance(any_kind, keras.Metric):
        any_kind = keras.metrics.MeanMetricWrapper(any_kind)
    # Keras would take the outputs for the weights of the labels.
    takes_values = type(any_kind) in (keras.metrics.Mean, keras.metrics.Sum)
    expected = f"a function for {any_kind.name!r}, such as lambda outputs, y: outputs"
    require(values is not None or not takes_values, "values", expected, values)

    def update_args(y: PyTree, outputs: PyTree) -> tuple[PyTree, ...]:
        return (y, outputs) if values is None else (values(outputs, y),)

    _build(any_kind, example, update_args)

    def init() -> list[jax.Array]:
        return _arrays(any_kind, any_kind.stateless_reset_state())

    def update(m: list[jax.Array], batch: PyTree, aux: Aux, loss: jax.Array) -> list[jax.Array]:
        del loss
        outputs, y, weight = aux.outputs, labels_of(batch, aux), aux.sample_weight
        if values is None and not isinstance(batch, tuple | list):
            require_labels(y)
        if weight is None and isinstance(batch, tuple | list) and len(batch) == 3:
            weight = batch[2]
        if output is not None:
            y = None if y is None else entry_of_output(y, output, "y")
            outputs = entry_of_output(outputs, output, "outputs")
            # A single array of weights is shared by all outputs.
            if not (weight is None or hasattr(weight, "shape")):
                weight = entry_of_output(weight, output, "sample_weight")
        weights = {"sample_weight": weight} if weighted and weight is not None else {}
        kind = _accuracy(y, outputs) if is_accuracy else any_kind
        values_after = kind.stateless_update_state(m, *update_args(y, outputs), **weights)
        return _arrays(kind, values_after)

    def compute(m: list[jax.Array]) -> Any:
        pairs = list(zip(any_kind.variables, m, strict=True))
        # A result may be a variable, which has its value inside the scope only.
        with keras.StatelessScope(pairs):
            result = keras.tree.map_structure(keras.ops.convert_to_tensor, any_kind.result())
        return jax.tree.map(_split_into_scalars, result)

    return Metric(init, update, compute)


def _arrays(keras_metric: Any, values: list[Any]) -> list[jax.Array]:
    """Returns the values of a metric's variables as arrays of their dtypes.

    Keras returns a variable itself for one that was not assigned.
    """
    convert = keras.ops.convert_to_tensor
    pairs = zip(values, keras_metric.variables, strict=True)
    return [convert(value, variable.dtype) for value, variable in pairs]


def _split_into_scalars(x: jax.Array) -> Any:
    """Returns an array as nested dicts of its scalars, since logs contain only scalars."""
    return {str(i): _split_into_scalars(row) for i, row in enumerate(x)} if jnp.ndim(x) else x


def _build(
    keras_metric: Any, example: Any, update_args: Callable[[PyTree, PyTree], tuple[PyTree, ...]]
) -> None:
    """Makes a metric create its variables, with the shapes of an example where it needs them.

    Raises:
      ValueError: The metric needs an example, and there is none.
    """
    if example is not None:

        def build(outputs: PyTree, y: PyTree) -> None:
            # The scope drops the values, which are tracers.
            with keras.StatelessScope(initialize_variables=False):
                keras_metric.update_state(*update_args(y, outputs))

        with _scope.initialize_new_variables():
            jax.eval_shape(build, *example)
    is_built = keras_private.metrics.is_built_metric(keras_metric) and keras_metric.variables
    expected = "a metric that has its variables"
    advice = "It creates them at the first batch: pass bridge.metric(..., example=(outputs, y))."
    require(is_built, "keras_metric", expected, keras_metric, advice)


def _accuracy(y: PyTree, outputs: PyTree) -> keras.Metric:
    """Returns the metric that `compile` makes of "accuracy" for such labels and outputs."""
    shapes = map(keras.KerasTensor, map(jnp.shape, (y, outputs)))
    with _scope.outside_of_traces():
        return keras_private.metrics.get_metric("accuracy", *shapes)
