"""bridge.metric gives what the Keras metric gives, batch after batch, and leaves it untouched."""

import bridge  # isort: skip  # before keras: it chooses the backend

import inspect
from typing import Any

import jax
import jax.numpy as jnp
import keras
import numpy as np
import optax
import pytest
from keras import layers, metrics

import functrain as ft
from tests.bridge.metric_cases import CASES, MORE, SIZES, C, Make, data, masked

# Of Keras 3.15's IoU metrics, which ask for int64, and cast weights to integers.
pytestmark = [
    pytest.mark.filterwarnings("ignore:Explicitly requested dtype int64"),
    pytest.mark.filterwarnings("ignore:You are passing weight as `float`"),
]
ONE_VALUE = ("Mean", "Sum")
QUICK = ("AUC", "Accuracy", "F1Score", "IoU", "Mean", "MeanMetricWrapper", "MeanSquaredError")
QUICK += ("PearsonCorrelation", "PrecisionAtRecall", "R2Score", "TopKCategoricalAccuracy")


def first(outputs: Any, y: Any) -> Any:
    return outputs


def bridged(name: str, keras_metric: keras.Metric, kind: str, **kwargs: Any) -> ft.metrics.Metric:
    values = first if name in ONE_VALUE else None
    return bridge.metric(keras_metric, values=values, example=data(kind, 2), **kwargs)


def batches(kind: str) -> list[tuple[Any, ...]]:
    rng = np.random.default_rng(9)
    found = []
    for seed, n in enumerate(SIZES):
        weight, mask = rng.uniform(0, 2, n).astype(np.float32), rng.uniform(size=n) > 0.4
        found.append((*data(kind, n, seed=seed), weight, mask))
    return found


def plain(result: Any) -> Any:
    """What `compute` makes of a Keras result: vectors are dicts."""
    if isinstance(result, dict):
        return {key: plain(value) for key, value in result.items()}
    result = np.asarray(result)
    return {str(i): plain(x) for i, x in enumerate(result)} if result.ndim else result


def require_equal(name: str, kind: str, make: Make) -> None:
    theirs, mine = make(), make()
    metric = bridged(name, mine, kind, weighted=True)

    @jax.jit
    def update(m: Any, outputs: Any, y: Any, weight: Any, mask: Any) -> Any:
        outputs = masked(outputs, mask)
        return metric.update(m, (None, y, weight), ft.Aux(outputs=outputs), None)

    @jax.jit
    def update_theirs(m: Any, outputs: Any, y: Any, weight: Any, mask: Any) -> Any:
        outputs = masked(outputs, mask)
        args = (outputs,) if name in ONE_VALUE else (y, outputs)
        return theirs.stateless_update_state(m, *args, weight)

    theirs.update_state(*data(kind, 2)[: 1 if name in ONE_VALUE else 2][::-1])  # builds it
    theirs.reset_state()
    m, expected = metric.init(), [v.value for v in theirs.variables]
    for outputs, y, weight, mask in batches(kind):
        m = update(m, outputs, y, weight, mask)
        expected = update_theirs(expected, outputs, y, weight, mask)
    jax.tree.map(np.testing.assert_array_equal, m, expected)
    for variable, value in zip(theirs.variables, expected, strict=True):
        variable.assign(value)
    got = jax.tree.map(np.asarray, metric.compute(m))
    jax.tree.map(np.testing.assert_array_equal, got, plain(theirs.result()))
    assert not any(np.any(v) for v in mine.variables), "the Keras object was written to"


def test_every_metric_of_keras_is_compared() -> None:
    public = {
        name
        for name, thing in vars(keras.metrics).items()
        if inspect.isclass(thing) and issubclass(thing, keras.Metric) and thing is not keras.Metric
    }
    assert public == set(CASES)


def quick(names: Any) -> list[Any]:
    return [n if n in QUICK else pytest.param(n, marks=pytest.mark.long) for n in names]


@pytest.mark.parametrize("name", quick([*CASES, *MORE]))
def test_a_metric_equals_keras(name: str) -> None:
    require_equal(name, *{**CASES, **MORE}[name])


def measure(metric: ft.metrics.Metric, *batches: Any) -> Any:
    """Returns the value of a metric after batches of outputs, labels and maybe weights."""
    m = metric.init()
    for outputs, *rest in batches:
        m = metric.update(m, (None, *rest), ft.Aux(outputs=jnp.asarray(outputs)), None)
    return metric.compute(m)


@pytest.mark.parametrize(
    ("keras_metric", "kind", "theirs"),
    [
        ("accuracy", "one_hot", metrics.CategoricalAccuracy),
        ("accuracy", "classes", metrics.SparseCategoricalAccuracy),
        ("acc", "chances", metrics.BinaryAccuracy),
        ("mean_squared_error", "numbers", metrics.MeanSquaredError),
        (keras.metrics.binary_accuracy, "bits", metrics.BinaryAccuracy),
    ],
)
def test_names_and_functions_are_metrics_as_in_compile(
    keras_metric: Any, kind: str, theirs: Any
) -> None:
    expected = theirs()
    pairs = [(outputs, y) for outputs, y, *_ in batches(kind)]
    if kind == "chances":
        pairs = [(outputs[:, None], y[:, None]) for outputs, y in pairs]
    for outputs, y in pairs:
        expected.update_state(y, outputs)
    assert measure(bridge.metric(keras_metric), *pairs) == expected.result()


class Extremes(keras.Metric):
    """Begins at something other than zero, holds a metric, and returns a dict of variables."""

    def __init__(self) -> None:
        super().__init__(name="extremes")
        self.least = self.add_variable((), "zeros", name="least")
        self.count = metrics.Sum()
        self.reset_state()

    def reset_state(self) -> None:
        self.least.assign(np.inf)
        self.count.reset_state()

    def update_state(self, y_true: Any, y_pred: Any, sample_weight: Any = None) -> None:
        self.least.assign(keras.ops.minimum(self.least, keras.ops.min(y_pred)))
        self.count.update_state(keras.ops.ones_like(y_pred))

    def result(self) -> dict[str, Any]:
        return {"least": self.least, "count": self.count.result()}


def test_a_metric_of_ones_own_starts_where_its_reset_leaves_it() -> None:
    theirs = Extremes()
    theirs.update_state(None, np.array([-5.0]))
    metric = bridge.metric(theirs)
    assert measure(metric, ([2.0, 3.0], None)) == {"least": 2.0, "count": 2.0}
    assert metric.compute(metric.init())["least"] == np.inf
    assert theirs.result() == {"least": -5.0, "count": 1.0}


def test_a_metric_runs_in_a_scan_and_under_vmap() -> None:
    metric = bridge.metric(metrics.AUC(num_thresholds=20))
    outputs, y = data("chances", 4, 6)

    def body(m: Any, batch: Any) -> tuple[Any, None]:
        return metric.update(m, (None, batch[1]), ft.Aux(outputs=batch[0]), None), None

    scanned, _ = jax.jit(lambda m: jax.lax.scan(body, m, (outputs, y)))(metric.init())
    theirs = metrics.AUC(num_thresholds=20)
    theirs.update_state(y.reshape(-1), outputs.reshape(-1))
    np.testing.assert_allclose(metric.compute(scanned), theirs.result(), rtol=1e-6)

    each = jax.vmap(lambda *batch: measure(metric, batch))(outputs, y)
    alone = [measure(metric, batch) for batch in zip(outputs, y, strict=True)]
    np.testing.assert_allclose(each, alone, rtol=1e-6)


def model_and_data() -> tuple[keras.Model, Any, Any, Any]:
    keras.utils.set_random_seed(0)
    rng = np.random.default_rng(0)
    x = keras.Input((5,), dtype="int32")
    h = layers.Embedding(7, 3, mask_zero=True)(x)
    model = keras.Model(x, layers.TimeDistributed(layers.Dense(C, "softmax"))(h))
    tokens = rng.integers(1, 7, (20, 5))
    tokens[:, 3:] = 0
    return model, tokens, rng.integers(0, C, (20, 5)), rng.uniform(0, 2, (20, 5)).astype(np.float32)


def test_training_with_masks_and_weights_is_that_of_fit() -> None:
    (net, x, y, weight), (twin, *_) = model_and_data(), model_and_data()
    loss = keras.losses.SparseCategoricalCrossentropy()
    ours = {
        "accuracy": bridge.metric("accuracy"),
        "top": bridge.metric(metrics.SparseTopKCategoricalAccuracy(2), weighted=True),
    }
    tx = optax.sgd(0.1)
    loss_fn = ft.supervised(bridge.from_keras(net), bridge.loss(loss))
    step, eval_step = ft.train_step(loss_fn, tx, metrics=ours), ft.eval_step(loss_fn, metrics=ours)
    loader = ft.ArrayLoader((x, y, weight), 8)
    evaluation = {"eval_data": loader, "eval_step": eval_step}
    state = bridge.create_state(net, tx)
    state, history = ft.fit(state, step, loader, epochs=2, verbose=0, **evaluation)
    top = metrics.SparseTopKCategoricalAccuracy(2, name="top")
    twin.compile(keras.optimizers.SGD(0.1), loss, metrics=["accuracy"], weighted_metrics=[top])
    how = {"sample_weight": weight, "validation_data": (x, y, weight), "shuffle": False}
    theirs = twin.fit(x, y, batch_size=8, epochs=2, verbose=0, **how).history
    for name in ("accuracy", "top", "val_loss", "val_accuracy", "val_top"):
        np.testing.assert_allclose(history.epochs[name], theirs[name], rtol=1e-6, err_msg=name)
    for a, b in zip(bridge.to_keras(state, net).weights, twin.weights, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-7)


def test_one_output_of_several_is_measured() -> None:
    outputs = {"a": np.array([[1.0], [2.0]]), "b": np.zeros((2, 1))}
    y = {"a": np.ones((2, 1)), "b": np.zeros((2, 1))}
    metric = bridge.metric("mae", output="a", weighted=True)
    for weight in (np.array([0.0, 1.0]), {"a": np.array([0.0, 1.0]), "b": np.ones(2)}):
        aux = ft.Aux(outputs=outputs)
        m = metric.update(metric.init(), (None, y, weight), aux, None)
        assert metric.compute(m) == 1.0


def test_results_for_each_class_are_logs_by_class() -> None:
    metric = bridge.metric(metrics.F1Score(), example=data("bits", 2))
    assert list(metric.compute(metric.init())) == ["0", "1", "2", "3"]
    shapes = jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype), data("bits", 2))
    assert len(bridge.metric(metrics.F1Score(), example=shapes).init()) == 4


def test_what_is_no_keras_metric_is_refused() -> None:
    for metric in ("acuracy", 3, ["accuracy"]):
        with pytest.raises(ValueError, match="Could not interpret metric identifier"):
            bridge.metric(metric)


def test_a_metric_that_needs_more_says_what() -> None:
    with pytest.raises(ValueError, match=r"F1Score.*at the first batch.*example=\(outputs, y\)"):
        bridge.metric(metrics.F1Score())
    with pytest.raises(ValueError, match=r"a function for 'mean', such as lambda outputs, y"):
        bridge.metric("mean")
    mae = bridge.metric("mae")
    with pytest.raises(ValueError, match="labels: expected labels to compare"):
        mae.update(mae.init(), np.ones((4, 2)), ft.Aux(outputs=np.ones((4, 2))), None)
    several = bridge.metric("mae", output="a")
    with pytest.raises(ValueError, match=r"y: expected a dict or list .*'a' among them"):
        several.update(several.init(), (None, {"b": 0}), ft.Aux(outputs={"b": 0}), None)
