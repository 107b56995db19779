"""Tasks of keras_hub: bridge.fit equals task.fit. `make test-adapters` has keras_hub.

The weights are random and the vocabularies made by hand, so nothing is downloaded.
"""

import bridge  # isort: skip  # before keras: it chooses the backend

import importlib
import warnings
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import keras
import numpy as np
import pytest

from tests.bridge import parity

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    pytest.importorskip("keras_hub")
    from tests.bridge.parity import hub_cases as hub
    from tests.bridge.parity.hub_cases import IMAGES, LABELS, TEXTS, WEIGHTS

pytestmark = [pytest.mark.adapters, pytest.mark.filterwarnings("ignore")]  # of TensorFlow
CASES = parity.Cases()
Case = parity.Case


def case(make: Callable[[], Any], x: Any, y: Any = None, **more: Any) -> Case:
    return make(), {"x": x, "y": y, "batch_size": 8, "shuffle": True, **more}


@CASES.every_run
def text_classifier() -> Case:
    return case(hub.text_classifier, TEXTS, LABELS)


@CASES.every_run
def sample_weight_and_a_validation_split() -> Case:
    arguments = {"sample_weight": WEIGHTS, "validation_split": 0.25}
    return case(hub.text_classifier, np.array(TEXTS), LABELS, **arguments)


@CASES.every_run
def gpt2() -> Case:
    return case(hub.gpt2, TEXTS, validation_data=(TEXTS[:9],))


@CASES.every_run
def image_classifier() -> Case:
    return case(hub.image_classifier, IMAGES, LABELS)


@CASES
def no_preprocessor() -> Case:
    task, arguments = case(hub.text_classifier, TEXTS, LABELS)
    x, y, _ = keras.utils.unpack_x_y_sample_weight(task.preprocess_samples(TEXTS, LABELS))
    task.preprocessor = None
    return task, arguments | {"x": x, "y": y}


def with_lora(quantized: str | None = None) -> Any:
    """Returns a GPT-2 of which only adapters of rank 2, and what LoRA leaves alone, are trained."""
    task = hub.gpt2()
    if quantized is not None:
        task.backbone.quantize(quantized)
    task.backbone.enable_lora(2)
    assert any("lora" in variable.path for variable in task.trainable_variables)
    return task


CASES.table(
    every_run="class_weight lora lora_on_an_int4_base",
    class_weight=lambda: case(
        hub.text_classifier,
        TEXTS,
        LABELS,
        class_weight={0: 1.0, 1: 3.0},
        validation_data=(TEXTS[:9], LABELS[:9]),
    ),
    too_many_steps_per_epoch=lambda: case(
        hub.text_classifier,
        TEXTS,
        LABELS,
        steps_per_epoch=20,
        epochs=3,
        validation_data=(TEXTS[:9], LABELS[:9]),
        validation_freq=2,
    ),
    pairs_of_texts=lambda: case(hub.text_classifier, (TEXTS, TEXTS[::-1]), LABELS),
    lora=lambda: case(with_lora, TEXTS),
    lora_on_an_int8_base=lambda: case(lambda: with_lora("int8"), TEXTS),
    lora_on_an_int4_base=lambda: case(lambda: with_lora("int4"), TEXTS),
)


def tf_data(*data: Any) -> Any:
    tf = pytest.importorskip("tensorflow")
    return tf.data.Dataset.from_tensor_slices(data).shuffle(50, seed=1).batch(8)


@CASES.every_run
def a_shuffled_tf_dataset_and_class_weight() -> Case:
    arguments = {"batch_size": None, "class_weight": {0: 1.0, 1: 3.0}}
    return case(hub.text_classifier, tf_data(TEXTS, LABELS), **arguments)


@CASES
def a_grain_dataset() -> Case:
    grain = pytest.importorskip("grain")
    rows = list(zip(TEXTS, LABELS, strict=True))
    batches = grain.MapDataset.source(rows).shuffle(seed=3).batch(8)
    task, arguments = case(hub.text_classifier, batches, batch_size=None)
    # Grain's threads would build it at the same time: keras_hub 0.32.0 marks it as built too early.
    task.preprocess_samples(TEXTS[:1])
    return task, arguments


def task_fit(task: Any, **arguments: Any) -> Any:
    return task.fit(**arguments)


def assert_fits_as_the_task(make: Callable[[], Case], fuse: Any = "auto") -> None:
    theirs, their_history = parity.run(make, task_fit)
    ours, history = parity.run(make, bridge.fit, fuse=fuse, rewrites="exact")
    np.testing.assert_equal(history, their_history)
    for one, other in zip(parity.variables(ours), parity.variables(theirs), strict=True):
        np.testing.assert_array_equal(one, other)


@CASES.each
def test_fit_equals_the_fit_of_the_task(make: Any, fuse: Any) -> None:
    assert_fits_as_the_task(make, fuse)


@pytest.mark.parametrize("make", [text_classifier, pytest.param(gpt2, marks=pytest.mark.long)])
def test_fit_equals_that_of_the_task_where_grain_is_missing(make: Any, monkeypatch: Any) -> None:
    without(monkeypatch, "grain")
    assert_fits_as_the_task(make)


@pytest.mark.parametrize("make", [sample_weight_and_a_validation_split, gpt2, image_classifier])
def test_evaluate_and_predict_equal_those_of_the_task(make: Any) -> None:
    task, arguments = make()
    data = {"x": arguments["x"], "y": arguments["y"], "batch_size": 8, "verbose": 0}
    weighted = {**data, "sample_weight": arguments.get("sample_weight"), "return_dict": True}
    ours = bridge.evaluate(task, **weighted, rewrites="exact")
    assert ours == task.evaluate(**weighted)
    del data["y"]
    predicted = bridge.predict(task, **data, rewrites="exact", fuse=2)
    np.testing.assert_array_equal(predicted, task.predict(**data))


def without(monkeypatch: Any, *libraries: str) -> None:
    """Makes keras_hub believe that a library is missing."""
    pipeline_model = importlib.import_module("keras_hub.src.utils.pipeline_model")
    for library in libraries:
        monkeypatch.setattr(pipeline_model, library, None)


def test_a_callback_generates_from_the_weights_of_its_epoch() -> None:
    class Sample(keras.callbacks.Callback):
        def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
            texts.append(self.model.generate("the", max_length=8))

    def make() -> Case:
        task, arguments = case(hub.gpt2, TEXTS, callbacks=[Sample()])
        sampler = hub.hub.samplers.RandomSampler(seed=0)
        task.compile("adam", task.loss, sampler=sampler, weighted_metrics=[])
        return task, arguments

    texts: list[str] = []
    parity.run(make, task_fit)
    theirs = texts.copy()
    texts.clear()
    parity.run(make, bridge.fit, rewrites="exact")
    assert texts == theirs
    assert len(set(texts)) == 2


@pytest.mark.parametrize(("mode", "is_right"), [("int8", False), ("int4", True)])
def test_the_gradient_through_a_quantized_tied_embedding(mode: str, is_right: bool) -> None:
    """As long as int8 is wrong in Keras, docs/keras.md and the guide leave embeddings out."""
    layer = keras.layers.ReversibleEmbedding(50, 16)
    layer.build()
    table = np.asarray(layer.embeddings.value)
    layer.quantize(mode)
    rng = np.random.default_rng(0)
    x, weights = (rng.normal(size=(4, n)).astype(np.float32) for n in (16, 50))
    gradient = jax.grad(lambda x: jnp.sum(layer(x, reverse=True) * weights))(x)
    right = weights @ table
    cosine = np.vdot(gradient, right) / np.linalg.norm(gradient) / np.linalg.norm(right)
    assert (cosine > 0.99) == is_right
