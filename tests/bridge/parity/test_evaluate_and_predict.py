"""bridge.evaluate and predict equal the methods of the model, whatever they are given."""

import bridge  # isort: skip  # before keras: it chooses the backend

from typing import Any

import keras
import numpy as np
import pytest

from tests.bridge.parity import BATCH, WEIGHTS, Case, X, Y, dense, test_data, test_models

WHOLE = {"batch_size": BATCH}


def of(make: Any) -> Any:
    def case() -> Case:
        model, arguments = make()
        return model, {"x": arguments["x"], "y": arguments["y"], **WHOLE}

    return case


CASES = {
    "arrays": lambda: dense(keras.layers.Dropout(0.5), **WHOLE),
    "weighted": lambda: dense(
        compiled={"weighted_metrics": ["mse"]}, sample_weight=WEIGHTS, **WHOLE
    ),
    "some_steps": lambda: dense(steps=3, **WHOLE),
    "steps_per_execution": lambda: dense(compiled={"steps_per_execution": 3}, **WHOLE),
    "py_dataset": lambda: dense(x=test_data.Batches(), y=None),
    "dict_targets": of(test_models.dict_targets),
    "lists_of_outputs": of(test_models.lists_of_outputs),
    "own_test_step": of(test_models.own_test_step),
    "metric_with_a_dict": of(test_models.metric_with_a_dict_and_a_reset_of_its_own),
    "own_metrics": of(test_models.own_compute_metrics),
}
OF_PREDICT = ("x", "batch_size", "steps")
EVERY_RUN = ("arrays", "weighted", "dict_targets", "own_test_step")
EACH = pytest.mark.parametrize(
    "make",
    [
        pytest.param(make, id=name, marks=[] if name in EVERY_RUN else [pytest.mark.long])
        for name, make in CASES.items()
    ],
)


@EACH
def test_evaluate_equals_keras(make: Any) -> None:
    model, arguments = make()
    theirs = model.evaluate(**arguments, verbose=0, return_dict=True)
    for fuse in (1, 5, "auto"):
        ours = bridge.evaluate(model, **arguments, verbose=0, return_dict=True, fuse=fuse)
        assert ours == theirs
    assert bridge.evaluate(model, **arguments, verbose=0) == model.evaluate(**arguments, verbose=0)


@EACH
def test_predict_equals_keras(make: Any) -> None:
    model, arguments = make()
    arguments = {name: arguments[name] for name in OF_PREDICT if name in arguments}
    theirs = model.predict(**arguments, verbose=0)
    for fuse in (1, 5, "auto"):
        ours = bridge.predict(model, **arguments, verbose=0, fuse=fuse)
        keras.tree.map_structure(np.testing.assert_array_equal, ours, theirs)


def test_a_generator_is_read_no_further_than_keras_reads_it() -> None:
    taken = {}
    for name, way in (("theirs", keras.Model.predict), ("ours", bridge.predict)):
        taken[name] = []

        def batches(taken: list[int] = taken[name]) -> Any:
            for i in range(10):
                taken.append(i)
                yield (X[i * 8 :][:8],)

        way(dense()[0], batches(), steps=5, verbose=0)
    assert taken["ours"] == taken["theirs"]


@pytest.mark.smoke
def test_a_model_that_was_fitted_evaluates_and_predicts_as_before() -> None:
    model, _ = dense()
    bridge.fit(model, X, Y, batch_size=BATCH, verbose=0)
    optimizer = [np.asarray(v.value) for v in model.optimizer.variables]
    assert bridge.evaluate(model, X, Y, verbose=0) == model.evaluate(X, Y, verbose=0)
    for before, after in zip(optimizer, model.optimizer.variables, strict=True):
        np.testing.assert_array_equal(before, after.value)
