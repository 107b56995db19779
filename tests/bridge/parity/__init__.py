"""bridge.fit equals model.fit: History and every variable, to the bit; what the cases share."""

import bridge  # isort: skip  # before keras: it chooses the backend

from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import pytest
from keras import layers, ops

N, BATCH = 104, 16  # six whole batches, and one of eight
RNG = np.random.default_rng(0)
X = RNG.normal(size=(N, 8)).astype(np.float32)
Y = RNG.normal(size=(N, 4)).astype(np.float32)
LABELS = RNG.integers(0, 4, N).astype(np.int32)  # with int64, jax 0.12 warns in Keras
IMAGES = RNG.normal(size=(N, 6, 6, 4)).astype(np.float32)
TOKENS = RNG.integers(0, 9, size=(N, 6)).astype(np.int32)
WEIGHTS = RNG.uniform(0.5, 2, N).astype(np.float32)
SEQUENCES = RNG.normal(size=(N, 6, 4)).astype(np.float32)

Case = tuple[keras.Model, dict[str, Any]]


class Cases:
    """Functions that return a model and the arguments of fit, both made anew at each call."""

    def __init__(self) -> None:
        self._all: list[Any] = []

    def __call__(self, make: Callable[[], Case], name: str = "", every_run: bool = False) -> Any:
        """Adds one that is run by `make test-all`."""
        marks = [] if every_run else [pytest.mark.long]
        self._all.append(pytest.param(make, marks=marks, id=name or make.__name__))
        return make

    def every_run(self, make: Callable[[], Case]) -> Any:
        """Adds one that is run by `make test`."""
        return self(make, every_run=True)

    def table(self, every_run: str = "", **cases: Callable[[], Case]) -> None:
        """Adds several by name, some of which are run by `make test`."""
        for name, make in cases.items():
            self(make, name, name in every_run.split())

    @property
    def each(self) -> Callable[[Any], Any]:
        """The decorator of a test that takes one case, `make`, and what is fused, `fuse`."""
        fuses = ["auto", *(pytest.param(k, marks=pytest.mark.long) for k in (1, 5))]
        of_cases = pytest.mark.parametrize("make", self._all)
        return lambda test: pytest.mark.parametrize("fuse", fuses, ids=str)(of_cases(test))


def dense(*more: Any, compiled: dict[str, Any] | None = None, **kwargs: Any) -> Case:
    net = [keras.Input((8,)), layers.Dense(8, "relu"), *more, layers.Dense(4)]
    model = keras.Sequential(net)
    model.compile(**{"optimizer": "adam", "loss": "mse", "metrics": ["mae"], **(compiled or {})})
    return model, {"x": X, "y": Y, **kwargs}


def classifier(*more: Any, **kwargs: Any) -> Case:
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    metrics = ["accuracy", keras.metrics.SparseTopKCategoricalAccuracy(2)]
    return dense(*more, compiled={"loss": loss, "metrics": metrics}, y=LABELS, **kwargs)


class AddsLoss(layers.Layer):
    def call(self, x: Any) -> Any:
        self.add_loss(0.1 * ops.mean(ops.square(x)))
        return x


class Subclassed(keras.Model):
    def __init__(self) -> None:
        super().__init__()
        self.hidden = layers.Dense(8, "relu")
        self.drop = layers.Dropout(0.3)
        self.out = layers.Dense(4)

    def call(self, x: Any, training: bool = False) -> Any:
        return self.out(self.drop(self.hidden(x), training=training))


def run(
    make: Callable[[], Case], way: Callable[..., Any], **options: Any
) -> tuple[keras.Model, Any]:
    """Fits a fresh model; returns it and the History."""
    keras.utils.clear_session()  # names are numbered from 0 again, and are keys of History
    keras.utils.set_random_seed(0)
    model, arguments = make()
    defaults = {"epochs": 2, "verbose": 0, "shuffle": False}
    if isinstance(arguments["x"], np.ndarray) and "steps_per_epoch" not in arguments:
        defaults["batch_size"] = BATCH
    np.random.seed(0)  # the order of shuffled arrays is drawn from it
    return model, way(model, **{**defaults, **arguments}, **options).history


def variables(model: keras.Model) -> list[Any]:
    optimizer = model.optimizer.variables if model.optimizer else []
    return [np.asarray(v.value) for v in [*model.variables, *optimizer, *model.metrics_variables]]


def assert_fits_as_keras(make: Callable[[], Case], fuse: Any) -> None:
    """Fits with Keras, and with the bridge: all bits are the same."""
    assert keras.Model.fit.__module__ == "keras.src.backend.jax.trainer", "is not Keras's own"
    keras_model, keras_history = run(make, keras.Model.fit)
    model, history = run(make, bridge.fit, fuse=fuse, rewrites="exact")
    np.testing.assert_equal(history, keras_history, err_msg=f"fuse={fuse}")
    pairs = zip(variables(keras_model), variables(model), strict=True)
    for i, (a, b) in enumerate(pairs):
        np.testing.assert_array_equal(a, b, err_msg=f"fuse={fuse}, variable {i}")
