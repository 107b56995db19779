"""What keras_hub's pipelines pass on to Keras (checked with keras_hub 0.32.0)."""

from bridge import keras_private  # isort: skip  # before keras: it chooses the backend

from typing import Any

import keras
import pytest


class Pipeline(keras.Model):
    def preprocess_samples(self, x: Any) -> Any:
        return x + self.shift

    def fit(self, x: Any, **kwargs: Any) -> Any:
        return super().fit(self.preprocess_samples(x), None, 4, **kwargs)


class Task(Pipeline):
    shift = 1

    def preprocess_samples(self, x: Any) -> Any:
        return 10 * super().preprocess_samples(x)


def test_the_class_that_prepares_is_found_among_the_bases() -> None:
    assert keras_private.trainer.preparing_class(Task()) is Pipeline
    assert keras_private.trainer.preparing_class(keras.Sequential()) is None


def test_arguments_are_those_passed_on_by_name_and_with_defaults() -> None:
    own = keras_private.trainer.prepared(Task(), "fit", x=1, epochs=3)
    assert (own.x, own.y, own.batch_size, own.epochs, own.validation_freq) == (20, None, 4, 3, 1)


def test_a_method_that_does_not_prepare_takes_its_arguments_unchanged() -> None:
    assert keras_private.trainer.prepared(Task(), "predict", x=1, steps=2).x == 1
    assert keras_private.trainer.prepared(keras.Sequential(), "fit", x=1, y=2).y == 2


@pytest.mark.adapters
@pytest.mark.filterwarnings("ignore")  # of TensorFlow
def test_one_class_of_keras_hub_prepares_for_all_three_methods() -> None:
    keras_hub = pytest.importorskip("keras_hub")
    bases = [c for c in keras_hub.models.Task.__mro__ if c.__module__.startswith("keras_hub")]
    (cls,) = (c for c in bases if "fit" in vars(c))
    assert cls.__name__ == "PipelineModel"
    assert {"evaluate", "predict", "preprocess_samples"} <= vars(cls).keys()
