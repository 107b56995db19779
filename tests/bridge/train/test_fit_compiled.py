"""Which models bridge.fit compiles: those that Keras does, and those that cannot tell."""

import bridge  # isort: skip  # before keras: it chooses the backend

import random
import warnings
from typing import Any

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

    def call(self, x: Any, training: bool = False) -> Any:
        return x + float(np.random.normal()) if training else x


class Rotation(layers.RandomRotation):
    """Of a user's class: it may do anything."""


class Step(keras.Sequential):
    """A model with a step of its own."""

    def train_step(self, *args: Any) -> Any:
        return super().train_step(*args)


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


def test_augmentation_that_keras_leaves_uncompiled_is_compiled() -> None:
    model, counted = make(*rotations())
    assert not model.jit_compile
    ours = fit(model)
    assert 0 < counted.calls < STEPS  # traces
    theirs = fit(make(*rotations())[0], keras.Model.fit)
    np.testing.assert_allclose(ours.history["loss"], theirs.history["loss"], rtol=1e-5)


def test_evaluate_and_predict_compile_it_too() -> None:
    model, counted = make(*rotations())
    loss = bridge.evaluate(model, X, Y, batch_size=4, verbose=0)
    outputs = bridge.predict(model, X, batch_size=4, verbose=0)
    assert 0 < counted.calls < len(X) // 4
    assert loss == pytest.approx(model.evaluate(X, Y, batch_size=4, verbose=0), rel=1e-5)
    np.testing.assert_allclose(outputs, model.predict(X, verbose=0), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    "layer",
    [
        layers.RandomPerspective(0.5, seed=1),
        layers.RandomShear(0.2, 0.2, seed=1),
        layers.RandomZoom(0.2, seed=1),
        layers.Pipeline(rotations()),
        layers.RandomRotation(0.2),  # a seed of its own
    ],
    ids=lambda layer: type(layer).__name__,
)
def test_keras_s_layers_that_draw_by_seed_generators_are_compiled(layer: Any) -> None:
    model, counted = make(layer)
    fit(model)
    assert 0 < counted.calls < STEPS


def test_what_jax_cannot_trace_runs_as_in_keras() -> None:
    crop = [layers.RandomCrop(4, 4, seed=1), layers.GlobalAveragePooling2D(keepdims=True)]
    model, counted = make(*crop)
    fit(model)
    assert counted.calls >= STEPS


@pytest.mark.parametrize("kwargs", [{}, {"rewrites": "exact"}])
def test_numpy_randomness_in_a_layer_is_drawn_in_every_step(kwargs: Any) -> None:
    runs = []
    for way, more in ((bridge.fit, kwargs), (keras.Model.fit, {})):
        model, _ = make(Noise(supports_jit=False))
        np.random.seed(3)
        fit(model, way, **more)
        runs.append((values(model), np.random.random()))
    (ours, drawn), (theirs, drawn_by_keras) = runs
    assert drawn == drawn_by_keras
    for one, other in zip(ours, theirs, strict=True):  # one by one, last bits vary
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-6)


@pytest.mark.long
def test_augmix_chooses_in_every_step(monkeypatch: pytest.MonkeyPatch) -> None:
    chosen: list[Any] = []
    choice = random.choice
    monkeypatch.setattr(random, "choice", lambda seq: [chosen.append(1), choice(seq)][1])
    layer = layers.AugMix(value_range=(0, 1), num_chains=2, chain_depth=2, all_ops=False)
    model, _ = make(layers.Rescaling(1.0), layer)
    model.fit(X[:4], Y[:4], batch_size=2, verbose=0)
    by_keras = len(chosen)
    model, _ = make(layers.Rescaling(1.0), layer)
    chosen.clear()
    bridge.fit(model, X[:4], Y[:4], batch_size=2, verbose=0)
    assert len(chosen) == by_keras > 0


@pytest.mark.parametrize(
    "first",
    [
        [layers.RandomRotation(0.2, seed=1), layers.Lambda(lambda x: x)],
        [layers.RandomRotation(0.2, seed=1), Noise(supports_jit=True)],
        [Rotation(0.2, seed=1)],
    ],
    ids=["Lambda", "Noise", "subclass"],
)
@pytest.mark.filterwarnings("ignore:model .* runs uncompiled")
def test_beside_layers_that_are_not_known_nothing_is_compiled(first: Any) -> None:
    model, counted = make(*first)
    fit(model)
    assert counted.calls >= STEPS


@pytest.mark.filterwarnings("ignore:model .* runs uncompiled")
def test_a_step_of_the_models_own_is_not_known() -> None:
    model, counted = make(*rotations(), cls=Step)
    fit(model)
    assert counted.calls >= STEPS
    model, counted = make(*rotations())
    model.train_step = model.train_step
    fit(model)
    assert counted.calls >= STEPS


def test_randomness_of_a_loss_is_seen_in_the_trace_and_not_used_up() -> None:
    def noisy(y: Any, outputs: Any) -> Any:
        return jnp.mean((y - outputs) ** 2, axis=-1) * np.random.uniform(0.5, 1.5)

    drawn = []
    for way in (bridge.fit, keras.Model.fit):
        model, _ = make(*rotations(), loss=noisy)
        fit(model, way)
        drawn.append(np.random.random())
    assert drawn[0] == drawn[1]


@pytest.fixture
def numpys_own() -> Any:
    """NumPy's own generator is put back, whatever kind of it there was."""
    before = np.random.get_state(legacy=False)
    yield
    np.random.set_bit_generator(np.random.MT19937())
    np.random.set_state(before)


@pytest.mark.usefixtures("numpys_own")
def test_randomness_is_seen_and_kept_whatever_generators_there_are() -> None:
    def noisy(y: Any, outputs: Any) -> Any:
        return jnp.mean((y - outputs) ** 2, axis=-1) * random.gauss(1, 0.1)

    drawn = []
    for way in (bridge.fit, keras.Model.fit):
        model, _ = make(*rotations(), loss=noisy)
        np.random.set_bit_generator(np.random.PCG64(0))
        random.seed(0)
        random.gauss()  # the next number is there already
        fit(model, way)
        drawn.append((random.gauss(), np.random.random()))
        np.random.set_bit_generator(np.random.MT19937())
    assert drawn[0] == drawn[1]


@pytest.mark.parametrize(
    ("kwargs", "compiled"),
    [
        ({"rewrites": "exact"}, {}),
        ({}, {"run_eagerly": True}),
    ],
)
def test_what_must_not_be_compiled_runs_as_in_keras(kwargs: Any, compiled: Any) -> None:
    model, counted = make(*rotations(), **compiled)
    fit(model, **kwargs)
    assert counted.calls >= STEPS


def test_a_model_that_keras_would_compile_stays_uncompiled_where_that_was_asked_for() -> None:
    model, counted = make(layers.Rescaling(2.0), jit_compile=False)
    fit(model)
    assert counted.calls >= STEPS


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


def test_compile_once_more_takes_an_explicit_no_back() -> None:
    model, counted = make(*rotations(), run_eagerly=True)
    model.compile("sgd", counted)
    fit(model)
    assert 0 < counted.calls < STEPS


def test_what_is_uncompiled_for_a_layer_not_known_is_told_how_to_be_compiled() -> None:
    model, counted = make(layers.RandomRotation(0.2, seed=1), layers.Lambda(lambda x: x))
    with pytest.warns(UserWarning, match=r"Lambda may have side effects.*\n?.*supports_jit = True"):
        fit(model)
    fit(model)  # once
    counted.calls = 0
    model.layers[0].supports_jit = True
    model.compile("sgd", counted)
    fit(model)
    assert 0 < counted.calls < STEPS


def test_the_open_way_says_once_what_is_frozen() -> None:
    class Own(layers.Layer):
        def __init__(self) -> None:
            super().__init__()
            self.supports_jit = False

        def call(self, x: Any) -> Any:
            return x * random.random()

    model, _ = make(Own(), *rotations())
    with pytest.warns(UserWarning, match="^Own: Keras does not compile models with this layer"):
        bridge.from_keras(model)
    bridge.from_keras(model)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        bridge.from_keras(make(*rotations())[0])
