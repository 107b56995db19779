"""Which models bridge compiles, and for how long: those that Keras does, for as long."""

import bridge  # isort: skip  # before keras: it chooses the backend

from typing import Any

import jax
import jax.numpy as jnp
import keras
import numpy as np
import pytest
from keras import layers

from tests.bridge.fitting import values

X = np.random.default_rng(0).normal(size=(20, 6, 6, 1)).astype(np.float32)
Y = np.random.default_rng(1).normal(size=(20, 2)).astype(np.float32)
STEPS = 10


class CountedLoss:
    """Counts how often Python comes by: in every step, or when one is traced."""

    def __init__(self) -> None:
        self.calls = 0
        self.__name__ = "counted"

    def __call__(self, y: Any, outputs: Any) -> Any:
        self.calls += 1
        return jnp.mean((y - outputs) ** 2, axis=-1)


class Noise(layers.Layer):
    """Draws by NumPy."""

    def __init__(self, supports_jit: bool) -> None:
        super().__init__()
        self.supports_jit = supports_jit

    def call(self, x: Any) -> Any:
        return x + float(np.random.normal())


class Lookup(layers.Layer):
    """Maps numbers to one-hot rows in Python, as IntegerLookup does: it cannot be traced."""

    def __init__(self) -> None:
        super().__init__()
        self.supports_jit = False

    def call(self, x: Any) -> Any:
        if isinstance(x, keras.KerasTensor | jax.core.Tracer):
            raise TypeError("it was traced")
        return jnp.asarray(np.eye(4, dtype=np.float32)[np.asarray(x)[:, 0]])

    def compute_output_spec(self, x: Any) -> Any:
        return keras.KerasTensor((None, 4))


class Calls(layers.Layer):
    """Counts its calls in Python."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def call(self, x: Any) -> Any:
        self.calls += 1
        return x * 2.0


def rotations() -> list[Any]:
    return [layers.RandomRotation(0.2, seed=1), layers.RandomTranslation(0.2, 0.2, seed=2)]


def make(
    *first: Any, cls: Any = keras.Sequential, loss: Any = None, **compiled: Any
) -> tuple[keras.Model, CountedLoss]:
    keras.utils.set_random_seed(0)
    counted = CountedLoss()
    model = cls([keras.Input((6, 6, 1)), *first, layers.Flatten(), layers.Dense(2)])
    model.compile(optimizer="sgd", loss=loss or counted, **compiled)
    return model, counted


def fit(model: keras.Model, way: Any = bridge.fit, **kwargs: Any) -> Any:
    return way(model, X, Y, batch_size=4, epochs=2, verbose=0, shuffle=False, **kwargs)


@pytest.mark.filterwarnings("ignore:model .* runs uncompiled")
@pytest.mark.parametrize(
    ("first", "compiled"),
    [
        (rotations, {}),
        (list, {"run_eagerly": True}),
        (list, {"jit_compile": False}),
        (lambda: [Noise(supports_jit=False)], {}),
    ],
    ids=["RandomRotation", "run_eagerly", "jit_compile", "Noise"],
)
def test_what_keras_leaves_uncompiled_runs_uncompiled(first: Any, compiled: Any) -> None:
    model, counted = make(*first(), **compiled)
    fit(model)
    assert counted.calls >= STEPS


def test_a_layer_with_supports_jit_is_compiled() -> None:
    model, counted = make(*rotations())
    with pytest.warns(UserWarning, match=r"RandomRotation, RandomTranslation .*supports_jit"):
        fit(model)
    for layer in model.layers[:2]:
        layer.supports_jit = True
    model.compile("sgd", counted)
    counted.calls = 0
    fit(model)
    assert 0 < counted.calls < STEPS  # traces


@pytest.mark.filterwarnings("ignore:model .* runs uncompiled")
@pytest.mark.parametrize("method", ["fit", "evaluate", "predict"])
@pytest.mark.parametrize("compiled", [{}, {"run_eagerly": True}, {"jit_compile": False}])
def test_random_draws_of_an_uncompiled_model_are_those_of_keras(method: str, compiled: Any) -> None:
    runs = []
    for way in (getattr(bridge, method), getattr(keras.Model, method)):
        model, _ = make(Noise(supports_jit=False), **compiled)
        data = (X,) if method == "predict" else (X, Y)
        np.random.seed(3)
        result = way(model, *data, batch_size=8, verbose=0)
        result = result.history["loss"] if method == "fit" else result
        runs.append((result, values(model), np.random.random()))
    (result, ours, drawn), (keras_result, theirs, drawn_by_keras) = runs
    assert drawn == drawn_by_keras
    for one, other in zip([result, *ours], [keras_result, *theirs], strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-6)  # last bits vary


@pytest.mark.filterwarnings("ignore:model .* runs uncompiled")
@pytest.mark.parametrize("dtype", ["int64", "int32", "uint8"])
def test_a_layer_that_cannot_be_traced_predicts_as_in_keras(dtype: str) -> None:
    keras.utils.set_random_seed(0)
    model = keras.Sequential([keras.Input((1,), dtype="int32"), Lookup(), layers.Dense(2)])
    x = np.array([[1], [2], [0], [3]], dtype)
    ours = bridge.predict(model, x, batch_size=3, verbose=0)
    np.testing.assert_allclose(ours, model.predict(x, verbose=0), rtol=1e-6)


@pytest.mark.parametrize("fuse", ["auto", 2])
def test_predict_traces_a_compiled_model_once_for_each_shape(fuse: Any) -> None:
    counts = []
    for way, more in ((bridge.predict, {"fuse": fuse}), (keras.Model.predict, {})):
        layer = Calls()
        model = keras.Sequential([keras.Input((6, 6, 1)), layer, layers.Flatten()])
        layer.calls = 0
        way(model, X, batch_size=6, verbose=0, **more)  # 6, 6, 6 and 2 examples
        counts.append(layer.calls)
    assert counts == [2, 2]


def changed(kind: str) -> tuple[keras.Model, Any]:
    """A model whose results a change makes larger, and the function that makes the change."""
    factor = {"of": 1.0}

    def loss(y: Any, outputs: Any) -> Any:
        return jnp.mean((y - outputs) ** 2, axis=-1) * factor["of"]

    rescaling = layers.Rescaling(1.0)
    model, _ = make(rescaling, loss=loss)

    def change() -> None:
        factor["of"] = 3.0
        rescaling.scale = 2.0
        if kind == "compile":
            model.compile("sgd", loss)
        elif kind == "force":
            for name in ("train", "test", "predict"):
                getattr(model, f"make_{name}_function")(force=True)

    return model, change


@pytest.mark.parametrize("kind", ["nothing", "compile", "force"])
@pytest.mark.parametrize("method", ["fit", "evaluate", "predict"])
def test_changes_of_attributes_and_closures_have_effect_when_they_have_in_keras(
    method: str, kind: str
) -> None:
    results = []
    for owner in (bridge, keras.Model):
        model, change = changed(kind)
        data = (X,) if method == "predict" else (X, Y)
        way = getattr(owner, method)
        first = way(model, *data, batch_size=10, verbose=0)
        change()
        second = way(model, *data, batch_size=10, verbose=0)
        results.append([x.history["loss"] if method == "fit" else x for x in (first, second)])
    np.testing.assert_allclose(results[0], results[1], rtol=1e-5)


def test_an_error_in_an_uncompiled_step_leaves_the_steps_before_it() -> None:
    class Failing(keras.Sequential):
        def train_step(self, state: Any, data: Any) -> Any:
            steps.append(1)
            assert len(steps) < 4, "the fourth step fails"
            return super().train_step(state, data)

    for way in (keras.Model.fit, bridge.fit):
        steps: list[int] = []
        model, _ = make(*rotations(), cls=Failing, run_eagerly=True)
        with pytest.raises(AssertionError, match="the fourth step fails"):
            fit(model, way)
        assert int(model.optimizer.iterations) == 3
