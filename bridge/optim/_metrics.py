"""Keras metrics as functrain metrics: pure functions of a list of arrays."""

import inspect
from collections.abc import Callable
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import keras

from bridge import keras_private
from bridge.model import _names, _scope
from functrain import Metric
from functrain.internal import PyTree, unpack

Example: TypeAlias = tuple[PyTree, PyTree]


def metric(
    keras_metric: Any,
    *,
    weighted: bool = False,
    output: str | int | None = None,
    values: Callable[[PyTree, PyTree], PyTree] | None = None,
    example: Example | None = None,
) -> Metric:
    """Returns a Keras metric as a `functrain.Metric`.

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
    _build(like, example, values)

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
            y, outputs = _of(y, output, "y"), _of(outputs, output, "outputs")
            weight = weight if hasattr(weight, "shape") else _of(weight, output, "sample_weight")
        found = choose(y, outputs)
        given = (y, outputs) if values is None else (values(outputs, y),)
        weights = {"sample_weight": weight} if weighted and weight is not None else {}
        return _update(found, m, *given, **weights)

    def compute(m: list[jax.Array]) -> Any:
        with keras.StatelessScope(_paired(like, m)):
            result = keras.tree.map_structure(keras.ops.convert_to_tensor, like.result())
        return jax.tree.map(_scalars, result)

    return Metric(init, update, compute)


def _of(tree: PyTree, output: str | int, name: str) -> Any:
    """Returns what belongs to one output."""
    try:
        return tree if tree is None else tree[output]
    except (KeyError, IndexError, TypeError):
        raise ValueError(
            f"output={output!r}: expected {name} in a dict or list that has it, got "
            f"{list(tree) if isinstance(tree, dict) else type(tree).__name__}"
        ) from None


def _update(keras_metric: Any, m: list[jax.Array], *args: PyTree, **kwargs: PyTree) -> list[Any]:
    with _scope.initialize_new_variables(), _scope.Scope(_paired(keras_metric, m)) as scope:
        keras_metric.update_state(*args, **kwargs)
    _paired(keras_metric, m)
    if scope.untracked:
        raise ValueError(
            f"{_name(keras_metric)}: expected updates of the metric's own variables, got those of"
            f"\n{scope.list_untracked()}\n"
            "which would be lost. Make them with self.add_variable."
        )
    return _values(keras_metric.variables, scope)


def _values(variables: list[Any], scope: keras.StatelessScope) -> list[jax.Array]:
    values = [(v, scope.get_current_value(v)) for v in variables]
    return [jnp.asarray(v.value if x is None else x, dtype=v.dtype) for v, x in values]


def _paired(keras_metric: Any, m: list[jax.Array]) -> list[tuple[Any, jax.Array]]:
    variables = keras_metric.variables
    if not isinstance(m, list | tuple) or len(m) != len(variables):
        got = f"{len(m)} values" if isinstance(m, list | tuple) else type(m).__name__
        raise ValueError(
            f"{_name(keras_metric)}: expected the {len(variables)} values that init returns, got "
            f"{got}. If the metric makes its variables at its first batch, pass one: "
            "bridge.metric(..., example=(outputs, y))."
        )
    return list(zip(variables, m, strict=True))


def _scalars(x: jax.Array) -> Any:
    """Returns an array as nested dicts of its scalars, which is what logs are made of."""
    return {str(i): _scalars(row) for i, row in enumerate(x)} if jnp.ndim(x) else x


def _build(
    keras_metric: Any,
    example: Example | None,
    values: Callable[[PyTree, PyTree], PyTree] | None,
) -> None:
    if example is not None:
        if not isinstance(example, tuple | list) or len(example) != 2:
            raise TypeError(
                "example: expected (outputs, y) of one batch, arrays or jax.ShapeDtypeStruct, got "
                f"{type(example).__name__}"
            )
        outputs, y = example
        given = (y, outputs) if values is None else (jax.eval_shape(values, outputs, y),)

        def discard(*given: PyTree) -> None:
            with _scope.Scope([]):
                keras_metric.update_state(*given)

        with _scope.initialize_new_variables():
            jax.eval_shape(discard, *given)
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
        raise TypeError("keras_metric: expected a Keras metric, got a functrain.Metric already")
    if isinstance(keras_metric, list | dict):
        raise TypeError(
            f"keras_metric: expected one metric, got {type(keras_metric).__name__}. "
            "functrain's steps take a dict of them: metrics={'accuracy': bridge.metric(...)}."
        )
    if isinstance(keras_metric, str):
        expected = "keras_metric: expected 'accuracy' or a name in keras.metrics"
        _names.require_known(keras_metric, keras.metrics, expected)
    elif not (callable(keras_metric) or isinstance(keras_metric, keras.Metric)):
        raise TypeError(
            "keras_metric: expected a keras.metrics.Metric, a name or a function (y_true, "
            f"y_pred), got {type(keras_metric).__name__}"
        )
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
