"""Keras metrics as functrain metrics: pure functions of a list of arrays."""

import inspect
from collections.abc import Callable
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import keras

from bridge import keras_private
from bridge.model import _names, _scope
from bridge.optim._losses import part_of
from functrain.internal import PyTree, unpack
from functrain.metrics import Metric

Example: TypeAlias = tuple[PyTree, PyTree]


def metric(
    keras_metric: Any,
    *,
    weighted: bool = False,
    output: str | int | None = None,
    values: Callable[[PyTree, PyTree], PyTree] | None = None,
    example: Example | None = None,
) -> Metric:
    """Returns a Keras metric as a `functrain.metrics.Metric`.

    Its state is the list of the Keras metric's variables, as arrays; it begins with what
    `reset_state` leaves. The Keras object itself is neither read nor written, so that one may
    serve several states at once; all works under `jit`, `scan` and `vmap`.

    Metrics that honour the mask on a model's outputs see it where they are updated in the trace
    of the forward pass: in evaluation. In a training step the gradient strips it, in functrain as
    in Keras's `fit`.

    Args:
      keras_metric: What `compile` takes: a `keras.metrics.Metric`, a name, a function
        ``(y_true, y_pred) -> [B, ...]``, of which the mean is taken.
      weighted: Weigh by the batch's `sample_weight`, where it has one, as `weighted_metrics` do.
      output: With several outputs in a dict or list, the key of the one to measure; labels, and
        weights if they are several, are picked by the same key.
      values: ``values(outputs, y) -> [B, ...]``, for metrics of one value, such as
        `keras.metrics.Mean` and `Sum`.
      example: ``(outputs, y)``, arrays or `jax.ShapeDtypeStruct`, for metrics that make their
        variables at their first batch (`F1Score`, `R2Score`, `AUC(multi_label=True)`).

    Returns:
      A Metric. Its ``compute`` returns what the Keras metric's `result` does: `f32[]`, or a dict;
      a result for each class, `f32[C]`, becomes a dict ``{"0": f32[], "1": ...}``.

    Raises:
      TypeError: `keras_metric` is nothing that Keras takes for a metric.
      ValueError: There is no such name; the metric needs `example` or `values`. From ``update``:
        it makes or updates variables that it does not track.

    Examples:
      >>> import keras, numpy as np
      >>> auc = metric(keras.metrics.AUC())
      >>> batch = None, np.array([0, 1, 1])
      >>> m = auc.update(auc.init(), batch, np.array([0.1, 0.9, 0.8]), None)
      >>> print(auc.compute(m))
      1.0
      >>> accuracy = metric("accuracy", weighted=True)
      >>> batch = None, np.array([0, 1]), np.array([3.0, 1.0])
      >>> scores = np.array([[0.9, 0.1], [0.6, 0.4]])
      >>> print(accuracy.compute(accuracy.update(accuracy.init(), batch, scores, None)))
      0.75
    """
    choose = _chooser(keras_metric)
    like = choose(None, None)
    _require_values(like, values)

    def arguments(outputs: PyTree, y: PyTree) -> tuple[PyTree, ...]:
        return (y, outputs) if values is None else (values(outputs, y),)

    _build(like, example, arguments)

    def init() -> list[jax.Array]:
        with _scope.initialize_new_variables(), _scope.Scope([]) as scope:
            like.reset_state()
        return _values(like.variables, scope)

    def update(
        m: list[jax.Array], batch: PyTree, outputs: PyTree, loss: jax.Array
    ) -> list[jax.Array]:
        del loss
        _, y, weight = unpack(batch)
        if output is not None:
            y = None if y is None else part_of(y, output, "y")
            outputs = part_of(outputs, output, "outputs")
            if not (weight is None or hasattr(weight, "shape")):
                weight = part_of(weight, output, "sample_weight")
        weights = {"sample_weight": weight} if weighted and weight is not None else {}
        return _update(choose(y, outputs), m, *arguments(outputs, y), **weights)

    def compute(m: list[jax.Array]) -> Any:
        with keras.StatelessScope(_paired(like, m)):
            result = keras.tree.map_structure(keras.ops.convert_to_tensor, like.result())
        return jax.tree.map(_scalars, result)

    return Metric(init, update, compute)


def _update(keras_metric: Any, m: list[jax.Array], *args: PyTree, **kwargs: PyTree) -> list[Any]:
    with _scope.initialize_new_variables(), _scope.Scope(_paired(keras_metric, m)) as scope:
        keras_metric.update_state(*args, **kwargs)
    _paired(keras_metric, m)  # none was made by the update
    scope.require_all_tracked(
        f"{_name(keras_metric)}: expected updates of the metric's own variables, got those of",
        "which would be lost. Make them with self.add_variable.",
    )
    return _values(keras_metric.variables, scope)


def _values(variables: list[Any], scope: keras.StatelessScope) -> list[jax.Array]:
    values = [(v, scope.get_current_value(v)) for v in variables]
    return [jnp.asarray(v.value if x is None else x, dtype=v.dtype) for v, x in values]


def _paired(keras_metric: Any, m: list[jax.Array]) -> list[tuple[Any, jax.Array]]:
    variables, values = keras_metric.variables, jax.tree.leaves(m)
    if len(values) != len(variables):
        raise ValueError(
            f"{_name(keras_metric)}: expected the {len(variables)} values that init returns, got "
            f"{len(values)} values. If the metric makes its variables at its first batch, pass "
            "one: bridge.metric(..., example=(outputs, y))."
        )
    return list(zip(variables, values, strict=True))


def _scalars(x: jax.Array) -> Any:
    """Returns an array as nested dicts of its scalars, which is what logs are made of."""
    return {str(i): _scalars(row) for i, row in enumerate(x)} if jnp.ndim(x) else x


def _build(
    keras_metric: Any, example: Any, arguments: Callable[[PyTree, PyTree], tuple[PyTree, ...]]
) -> None:
    if example is not None:
        if not isinstance(example, tuple | list) or len(example) != 2:
            raise TypeError(
                "example: expected (outputs, y) of one batch, arrays or jax.ShapeDtypeStruct, got "
                f"{type(example).__name__}"
            )

        def discard(outputs: PyTree, y: PyTree) -> None:
            with _scope.Scope([]):
                keras_metric.update_state(*arguments(outputs, y))

        with _scope.initialize_new_variables():
            jax.eval_shape(discard, *example)
    if not (keras_private.metrics.is_built_metric(keras_metric) and keras_metric.variables):
        raise ValueError(
            f"keras_metric: {_name(keras_metric)} makes its variables at its first batch, and "
            "running metrics begin before it. Pass outputs and labels of one batch, or their "
            "shapes: bridge.metric(..., example=(outputs, y))."
        )


def _chooser(keras_metric: Any) -> Callable[[PyTree, PyTree], Any]:
    """Returns what gives the metric for labels and outputs; "accuracy" depends on their shapes."""
    if isinstance(keras_metric, str) and keras_metric.lower() in ("accuracy", "acc"):
        kinds: dict[Any, Any] = {}  # one metric of each kind, all with the same variables

        def choose(y: PyTree, outputs: PyTree) -> Any:
            if y is None:
                return kinds.setdefault(None, keras.metrics.BinaryAccuracy())
            shapes = [keras.KerasTensor(jnp.shape(x)) for x in (y, outputs)]
            with _scope.outside_of_traces():  # it is kept, so that no value may be traced
                found = keras_private.metrics.get_metric(keras_metric, *shapes)
            return kinds.setdefault(type(found), found)

        return choose
    found = _resolve(keras_metric)
    return lambda y, outputs: found


def _resolve(keras_metric: Any) -> Any:
    if isinstance(keras_metric, Metric):
        raise TypeError(
            "keras_metric: expected a Keras metric, got a functrain.metrics.Metric already"
        )
    if isinstance(keras_metric, list | dict):
        raise TypeError(
            f"keras_metric: expected one metric, got {type(keras_metric).__name__}. "
            "functrain's steps take a dict of them: metrics={'accuracy': bridge.metric(...)}."
        )
    expected = (
        "keras_metric: expected a keras.metrics.Metric, a name or a function (y_true, y_pred)"
    )
    _names.require_known(keras_metric, keras.metrics, expected)
    found = keras.metrics.get(keras_metric)
    return found if isinstance(found, keras.Metric) else keras.metrics.MeanMetricWrapper(found)


def _require_values(keras_metric: Any, values: Any) -> None:
    first = next(iter(inspect.signature(keras_metric.update_state).parameters), "")
    if first == "values" and values is None:
        raise ValueError(
            f"keras_metric: {_name(keras_metric)} takes one value, not labels and outputs. Say "
            "which: bridge.metric(..., values=lambda outputs, y: ...)."
        )


def _name(keras_metric: Any) -> str:
    return f"{type(keras_metric).__name__} {keras_metric.name!r}"
