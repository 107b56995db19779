import jax
import jax.numpy as jnp
import keras
import numpy as np
import pytest

import functrain as ft

RNG = np.random.default_rng(1)
BATCHES = [
    (
        RNG.normal(size=(n, 6)).astype(np.float32),
        RNG.integers(0, 6, n),
        RNG.uniform(0, 2, n).astype(np.float32),
    )
    for n in (16, 16, 5)
]


def running(metric, batches):
    update = jax.jit(metric.update)
    m = metric.init()
    for outputs, y, weight in batches:
        m = update(m, (outputs, y), ft.Aux(outputs=outputs, sample_weight=weight), jnp.float32(0.0))
    return np.asarray(metric.compute(m))


def keras_running(metric, batches, weighted):
    for outputs, y, weight in batches:
        metric.update_state(y, outputs, sample_weight=weight if weighted else None)
    return np.asarray(metric.result())


CASES = {
    "accuracy": (ft.metrics.accuracy, keras.metrics.SparseCategoricalAccuracy, lambda o, y: (o, y)),
    "accuracy, one-hot": (
        ft.metrics.accuracy,
        keras.metrics.CategoricalAccuracy,
        lambda o, y: (o, np.eye(6, dtype=np.float32)[y]),
    ),
    "accuracy, labels [B, 1]": (
        ft.metrics.accuracy,
        keras.metrics.SparseCategoricalAccuracy,
        lambda o, y: (o, y[:, None]),
    ),
    "top 3": (
        lambda **kw: ft.metrics.top_k_accuracy(3, **kw),
        lambda: keras.metrics.SparseTopKCategoricalAccuracy(3),
        lambda o, y: (o, y),
    ),
    "binary accuracy": (
        ft.metrics.binary_accuracy,
        keras.metrics.BinaryAccuracy,
        lambda o, y: (o[:, :1], (y[:, None] > 2).astype(np.int32)),
    ),
    "mse": (
        ft.metrics.mean_squared_error,
        keras.metrics.MeanSquaredError,
        lambda o, y: (o, np.flip(o, 1).copy()),
    ),
    "mae": (
        ft.metrics.mean_absolute_error,
        keras.metrics.MeanAbsoluteError,
        lambda o, y: (o, np.flip(o, 1).copy()),
    ),
}


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_the_value_equals_keras_over_batches_of_unequal_size(case, weighted) -> None:
    ours, theirs, shape = CASES[case]
    batches = [(*shape(o, y), w) for o, y, w in BATCHES]
    np.testing.assert_allclose(
        running(ours(weighted=weighted), batches),
        keras_running(theirs(), batches, weighted),
        rtol=2e-6,
    )


@pytest.mark.parametrize("metric", [ft.metrics.mean_loss(), ft.metrics.mean(lambda o, y: o)])
def test_the_mean_of_very_many_examples_does_not_drift(metric) -> None:
    batches = 1_500_000  # 2**26 examples are passed in the first half
    losses = jnp.linspace(1, 2, batches)

    def step(m, loss):
        return metric.update(m, (np.ones(100),), ft.Aux(outputs=jnp.full(100, loss)), loss), None

    m, _ = jax.jit(lambda m: jax.lax.scan(step, m, losses))(metric.init())
    assert float(metric.compute(m)) == pytest.approx(1.5, rel=1e-6)


def test_a_mean_with_infinity_is_infinite() -> None:
    metric = ft.metrics.mean_loss()
    m = metric.init()
    for loss in (1.0, jnp.inf, 1.0):
        m = metric.update(m, np.ones((4, 2)), ft.Aux(), jnp.float32(loss))
    assert metric.compute(m) == jnp.inf


def test_a_mean_over_a_batch_counts_as_often_as_the_batch_has_examples() -> None:
    values = [
        running(ft.metrics.mean(value, weighted=False), BATCHES)
        for value in (lambda o, y: o[:, 0], lambda o, y: o[:, 0].mean())
    ]
    np.testing.assert_allclose(values[0], values[1], rtol=1e-5)


def test_smoothed_labels_are_those_that_they_were() -> None:
    outputs, y = np.array([0.9, 0.1, 0.8, 0.2], np.float32), np.array([1, 0, 0, 1], np.float32)
    for labels in (y, y * 0.9 + 0.05, y * 2 - 1, y > 0):
        assert running(ft.metrics.binary_accuracy(), [(outputs, labels, None)]) == 0.5


@pytest.mark.parametrize("k", [0, -1, 2.5])
def test_a_k_that_is_no_count_is_refused(k) -> None:
    with pytest.raises(ValueError, match=f"k: expected an integer of at least 1, got {k}"):
        ft.metrics.top_k_accuracy(k)


@pytest.mark.parametrize(
    "metric",
    [
        ft.metrics.accuracy(),
        ft.metrics.top_k_accuracy(2),
        ft.metrics.mean_loss(),
        ft.metrics.collection({"a": ft.metrics.accuracy(), "loss": ft.metrics.mean_loss()}),
    ],
)
def test_a_state_keeps_its_types_so_that_it_can_be_scanned(metric, strict_promotion) -> None:
    outputs, y, weight = BATCHES[0]
    y = jnp.asarray(y, jnp.int32)
    m = metric.init()
    new = jax.jit(metric.update)(
        m, (outputs, y), ft.Aux(outputs=jnp.asarray(outputs), sample_weight=weight), jnp.float32(1)
    )
    for a, b in zip(jax.tree.leaves(m), jax.tree.leaves(new), strict=True):
        assert (a.shape, a.dtype, a.weak_type) == (b.shape, b.dtype, b.weak_type)


def test_a_mean_counts_only_the_values_where_a_condition_holds() -> None:
    metric = ft.metrics.mean(lambda o, y: o, where=lambda o, y: y > 0, weighted=True)
    values = np.array([1.0, np.nan, 3.0, 5.0], np.float32)
    batches = [
        (values, np.array([1, 0, 1, 0]), np.array([1.0, 1.0, 3.0, 1.0], np.float32)),
        (values, np.array([0, 0, 0, 1]), np.array([1.0, 1.0, 3.0, 2.0], np.float32)),
    ]
    assert running(metric, batches) == pytest.approx((1 + 3 * 3 + 2 * 5) / (1 + 3 + 2))


def test_weights_of_other_axes_than_the_values_are_refused_with_the_way_out() -> None:
    aux = ft.Aux(outputs=jnp.ones((4, 3)), sample_weight=np.ones((4, 3), np.float32))
    of_rows = ft.metrics.mean(lambda o, y: o.sum(-1))
    with pytest.raises(ValueError, match=r"sample_weight: .*float32\[4, 3\].*weighted=False"):
        of_rows.update(of_rows.init(), (), aux, None)
    of_all = ft.metrics.mean(lambda o, y: o.sum(-1), weighted=False)
    assert of_all.compute(of_all.update(of_all.init(), (), aux, None)) == 3


@pytest.mark.parametrize("batch", [(), {"x": np.ones(3)}, np.ones((3, 2))], ids=str)
def test_a_batch_that_is_no_tuple_has_no_labels(batch) -> None:
    seen = []
    metric = ft.metrics.mean(lambda o, y: seen.append(y) or o)
    metric.update(metric.init(), batch, ft.Aux(outputs=jnp.ones(3)), jnp.float32(0))
    assert seen == [None]


def test_what_is_no_metric_is_refused_by_name() -> None:
    with pytest.raises(TypeError, match=r"metrics\['acc'\]: expected a Metric, got str"):
        ft.metrics.collection({"acc": "accuracy"})
    with pytest.raises(TypeError, match=r"metrics: expected a dict of Metrics by name.*got list"):
        ft.metrics.collection(["accuracy"])
    with pytest.raises(TypeError, match=r"got function\. Call it: accuracy\(\.\.\.\)"):
        ft.metrics.collection({"acc": ft.metrics.accuracy})


@pytest.mark.parametrize(
    ("metric", "outputs", "labels"),
    [
        (ft.metrics.accuracy(), np.zeros((4, 2)), np.zeros(3, int)),
        (ft.metrics.mean_squared_error(), np.ones((2, 3, 4)), np.ones((2, 4, 3))),
    ],
)
def test_labels_of_other_axes_than_the_outputs_are_refused(metric, outputs, labels) -> None:
    with pytest.raises(ValueError, match=r"labels: expected the shape of outputs \((4,|2, 3, 4)\)"):
        metric.update(metric.init(), (None, labels), ft.Aux(outputs=jnp.asarray(outputs)), None)


def test_a_mean_of_no_values_is_nan() -> None:
    metric = ft.metrics.mean(lambda o, y: o, where=lambda o, y: jnp.zeros(o.shape, bool))
    assert np.isnan(running(metric, [(np.ones(3, np.float32), np.ones(3), None)]))
    assert np.isnan(metric.compute(metric.init()))


def top_k_in_float64(k, outputs, labels):
    """By counting: a hit if the label is a class, its score a number, and fewer than k beat it."""
    hits = []
    for row, label in zip(np.asarray(outputs, np.float64), labels, strict=True):
        known = 0 <= label < len(row) and not np.isnan(row[label])
        above = known and sum(other > row[label] or np.isnan(other) for other in row)
        hits.append(known and above < k)
    return np.mean(hits)


@pytest.mark.parametrize("k", [1, 2, 5, 9])
def test_no_label_that_is_no_class_and_no_nan_is_among_the_largest(k) -> None:
    outputs, labels, _ = BATCHES[0]
    metric = ft.metrics.top_k_accuracy(k)
    everything = np.full_like(outputs, np.nan)
    for no_class in (-1, 6, 100):
        assert running(metric, [(outputs, np.full_like(labels, no_class), None)]) == 0.0
    assert running(metric, [(everything, labels, None)]) == 0.0
    rng = np.random.default_rng(k)
    some = outputs.copy()
    some[rng.uniform(size=some.shape) < 0.2] = np.nan
    some[rng.uniform(size=some.shape) < 0.1] = np.inf
    mixed = np.where(rng.uniform(size=labels.shape) < 0.2, -1, labels)
    for scores, y in ((outputs, labels), (some, labels), (some, mixed)):
        assert running(metric, [(scores, y, None)]) == top_k_in_float64(k, scores, y)


@pytest.mark.parametrize("make", [ft.metrics.accuracy, lambda: ft.metrics.top_k_accuracy(2)])
@pytest.mark.parametrize("shape", [(4, 1), (4,)])
def test_one_score_an_example_has_no_largest_class(make, shape) -> None:
    metric = make()
    scores, y = np.array([0.9, 0.1, 0.8, 0.7], np.float32).reshape(shape), np.array([1, 0, 1, 1])
    with pytest.raises(
        ValueError, match=r"accuracy: expected scores .*float32\[4.*binary_accuracy"
    ):
        metric.update(metric.init(), (None, y), ft.Aux(outputs=scores), None)
    binary = ft.metrics.binary_accuracy()
    aux = ft.Aux(outputs=scores)
    assert binary.compute(binary.update(binary.init(), (None, y), aux, None)) == 1
