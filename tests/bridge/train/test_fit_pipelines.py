"""Models that prepare data in their own fit, evaluate and predict, as tasks of keras_hub do.

`tests/bridge/parity/test_hub.py` has the tasks themselves, for environments with keras_hub.
"""

import bridge  # isort: skip  # before keras: it chooses the backend

from typing import Any

import keras
import numpy as np
import pytest
from keras import layers

TEXTS = [f"{'word ' * (i % 7)}end" for i in range(40)]
Y = np.random.default_rng(0).normal(size=(40, 2)).astype(np.float32)
WEIGHTS = np.linspace(0.5, 2, 40, dtype=np.float32)


class Task(keras.Model):
    """Counts letters and words: prepares data and passes them on, as `PipelineModel` does."""

    def __init__(self) -> None:
        x = keras.Input((2,))
        super().__init__(x, layers.Dense(2)(layers.Dense(4, "relu")(x)))
        self.compile("adam", "mse", metrics=["mae"])

    def preprocess_samples(self, x: Any, y: Any = None, sample_weight: Any = None) -> Any:
        x = np.array([(len(text), text.count(" ")) for text in x], np.float32) / 20
        return keras.utils.pack_x_y_sample_weight(x, y, sample_weight)

    def _prepared(self, x: Any, y: Any = None, sample_weight: Any = None) -> Any:
        data = self.preprocess_samples(x, y, sample_weight)
        return keras.utils.unpack_x_y_sample_weight(data)

    def fit(self, x: Any, y: Any = None, validation_data: Any = None, **kwargs: Any) -> Any:
        x, y, sample_weight = self._prepared(x, y, kwargs.pop("sample_weight", None))
        if validation_data is not None:
            validation_data = self._prepared(*validation_data)
        kwargs |= {"sample_weight": sample_weight, "validation_data": validation_data}
        return super().fit(x, y, **kwargs)

    def evaluate(self, x: Any, y: Any = None, **kwargs: Any) -> Any:
        if kwargs.get("_use_cached_eval_dataset"):  # from the end of an epoch: prepared already
            return super().evaluate(x, y, **kwargs)
        x, y, sample_weight = self._prepared(x, y, kwargs.pop("sample_weight", None))
        return super().evaluate(x, y, sample_weight=sample_weight, **kwargs)

    def predict(self, x: Any, **kwargs: Any) -> Any:
        return super().predict(self._prepared(x)[0], **kwargs)


def task(cls: type = Task) -> Any:
    keras.utils.set_random_seed(0)
    return cls()


def assert_equal(a: Any, b: Any) -> None:
    for one, other in zip(a.get_weights(), b.get_weights(), strict=True):
        np.testing.assert_array_equal(one, other)


@pytest.mark.parametrize(
    "arguments",
    [
        {},
        {"shuffle": False, "batch_size": 7},
        {"sample_weight": WEIGHTS, "validation_data": (TEXTS[:9], Y[:9]), "epochs": 3},
    ],
    ids=["shuffled", "in order", "weighted and validated"],
)
def test_fit_takes_texts_as_the_models_own_fit(arguments: Any) -> None:
    ours, theirs = task(), task()
    history = bridge.fit(ours, TEXTS, Y, verbose=0, rewrites="exact", **arguments).history
    keras.utils.set_random_seed(0)
    task()
    assert history == theirs.fit(TEXTS, Y, verbose=0, **arguments).history
    assert_equal(ours, theirs)


def test_evaluate_and_predict_take_texts_as_the_models_own() -> None:
    model = task()
    exact = {"verbose": 0, "rewrites": "exact"}
    logs = bridge.evaluate(model, TEXTS, Y, sample_weight=WEIGHTS, return_dict=True, **exact)
    theirs = model.evaluate(TEXTS, Y, sample_weight=WEIGHTS, return_dict=True, verbose=0)
    assert logs == theirs
    np.testing.assert_array_equal(
        bridge.predict(model, TEXTS, **exact), model.predict(TEXTS, verbose=0)
    )


def test_resumed_texts_end_as_those_of_one_fit(tmp_path: Any) -> None:
    import functrain as ft

    def fit(model: Any, epochs: int, folder: str) -> None:
        checkpointer = ft.Checkpointer(tmp_path / folder)
        bridge.fit(model, TEXTS, Y, epochs=epochs, verbose=0, checkpointer=checkpointer)

    whole, resumed = task(), task()
    fit(whole, 3, "whole")
    keras.utils.set_random_seed(0)
    fit(task(), 1, "parts")
    keras.utils.set_random_seed(1)
    fit(resumed, 3, "parts")
    assert_equal(whole, resumed)


def test_a_fit_that_does_not_end_with_keras_fit_is_refused() -> None:
    class Other(Task):
        def preprocess_samples(self, x: Any, y: Any = None, sample_weight: Any = None) -> Any:
            return super().preprocess_samples(x, y, sample_weight)

        def fit(self, *args: Any, **kwargs: Any) -> Any:
            return super().fit(*args, **kwargs), 1

    with pytest.raises(TypeError, match=r"return super\(\)\.fit\(\.\.\.\)`, got tuple"):
        bridge.fit(task(Other), TEXTS, Y, verbose=0)
