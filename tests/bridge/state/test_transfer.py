"""What an optimizer remembers goes from Keras to optax and back, and training does not jump."""

import bridge  # isort: skip  # before keras: it chooses the backend

import subprocess
import sys
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import jax
import keras
import numpy as np
import optax
import pytest
from keras import layers

import functrain as ft
from tests.bridge.optax_cases import by_layer
from tests.bridge.optimizer_cases import CASES, K

X = np.random.default_rng(0).normal(size=(64, 6)).astype(np.float32)
Y = np.random.default_rng(1).normal(size=(64, 2)).astype(np.float32)


def make_model(optimizer: Any = None) -> keras.Model:
    """Layers in another order than that of their names, so that orders matter."""
    keras.utils.set_random_seed(0)
    net = [keras.Input((6,)), layers.Dense(8, "relu", name="z"), layers.Dense(2, name="a")]
    model = keras.Sequential(net)
    model.compile(optimizer, keras.losses.MeanSquaredError())
    return model


def fit(model: keras.Model, epochs: int = 1) -> keras.Model:
    model.fit(X, Y, batch_size=8, epochs=epochs, verbose=0, shuffle=False)
    return model


def go_on(model: keras.Model, tx: Any, **arguments: Any) -> ft.TrainState:
    """One epoch more, in the loop of functrain."""
    state = bridge.create_state(model, tx, **arguments)
    loss_fn = ft.supervised(bridge.from_keras(model), bridge.loss("mse"))
    loader = ft.ArrayLoader((X, Y), 8)
    state, _ = ft.fit(state, ft.train_step(loss_fn, tx), loader, epochs=1, verbose=False)
    return state


def values(model: keras.Model) -> np.ndarray:
    every = [*model.trainable_variables, *model.optimizer.variables]
    return np.concatenate([np.ravel(np.asarray(v.value, np.float64)) for v in every])


PARTS = {"a": optax.adam(1e-2), "z": optax.sgd(0.1, momentum=0.9)}
OPTAX: dict[str, Callable[[], Any]] = {
    "adamw": lambda: bridge.OptaxOptimizer(optax.adamw, learning_rate=1e-2),
    "multi_transform": lambda: bridge.OptaxOptimizer(optax.multi_transform(PARTS, by_layer)),
    "MultiSteps": lambda: bridge.OptaxOptimizer(optax.MultiSteps(optax.adam(1e-2), 3)),
}
QUICK = ("Adam", "Muon", "SGD momentum, schedule", "Adam accumulation, schedule", *OPTAX)


@pytest.mark.parametrize(
    "name",
    [
        name if name in QUICK else pytest.param(name, marks=pytest.mark.long)
        for name in [*CASES, *OPTAX]
        if name != "Adam ema"  # Keras's fit ends with the average in place of the weights
    ],
)
def test_keras_then_functrain_then_keras_is_the_uninterrupted_run(name: str) -> None:
    make = {**CASES, **OPTAX}[name]
    whole, model = fit(make_model(make()), 3), fit(make_model(make()))
    is_optax = name in OPTAX
    tx = model.optimizer.tx if is_optax else bridge.optimizer(model.optimizer, model=model)
    state = go_on(model, tx)
    assert int(state.step) == 16
    bridge.to_keras(state, model, optimizer="require")
    tolerance = {"rtol": 1e-5, "atol": 1e-6} if is_optax else {"rtol": 2e-4, "atol": 2e-5}
    np.testing.assert_allclose(values(fit(model)), values(whole), **tolerance)


def test_starting_anew_instead_is_another_run() -> None:
    """The bound above is not met by forgetting the slots."""
    whole, model = fit(make_model(K.Adam(1e-2)), 2), fit(make_model(K.Adam(1e-2)))
    state = go_on(model, bridge.optimizer(model.optimizer), optimizer="new")
    bridge.to_keras(state, model, optimizer="leave")
    assert np.max(np.abs(values(model) - values(whole))) > 1e-3


class Held(keras.Model):
    """Its layers go by their attributes in create_state, and by their classes in variable.path."""

    def __init__(self) -> None:
        super().__init__()
        self.second, self.first = layers.Dense(2), layers.Dense(8)

    def call(self, x: Any) -> Any:
        return self.second(self.first(x))


def test_keys_of_params_may_differ() -> None:
    model = Held()
    model.compile(bridge.OptaxOptimizer(optax.adam(1e-2)), "mse")
    fit(model)
    state = bridge.create_state(model, bridge.optimizer(model.optimizer))
    assert set(state.opt_state[0].mu) == {"first", "second"}
    assert set(model.optimizer.opt_state[0].mu) == {"held"}
    before = values(model)
    for v in model.optimizer.variables:
        v.assign(0 * v.value)
    bridge.to_keras(state, model, optimizer="require")
    np.testing.assert_array_equal(values(model), before)
    variables = SimpleNamespace(params=state.params, model_state=state.model_state)
    bridge.to_keras(variables, model)  # without a count of steps, that of the optimizer stays
    assert int(model.optimizer.iterations) == 8


def test_what_came_from_keras_goes_back_to_the_bit() -> None:
    for name in ("AdamW", "Adam ema", "LossScaleOptimizer", "MultiOptimizer", "Adafactor"):
        model = fit(make_model(CASES[name]()))
        state = bridge.create_state(model, bridge.optimizer(model.optimizer))
        before = values(model)
        for v in model.variables:
            if v.dtype == "float32":
                v.assign(0 * v.value)
        bridge.to_keras(state, model)
        np.testing.assert_array_equal(values(model), before)
        jax.tree.map(lambda x: x.delete(), state)
        fit(model)  # It has buffers of its own.


@pytest.mark.smoke
def test_an_optimizer_that_was_not_built_is_built() -> None:
    model = make_model(K.Adam(1e-2))
    state = go_on(model, bridge.optimizer(model.optimizer))
    assert not model.optimizer.built
    bridge.to_keras(state, model)
    assert int(model.optimizer.iterations) == 8
    whole = fit(make_model(K.Adam(1e-2)), 2)
    np.testing.assert_allclose(values(fit(model)), values(whole), rtol=2e-4, atol=1e-5)


def test_a_file_written_after_a_functional_run_goes_on_in_plain_keras(tmp_path: Any) -> None:
    model = make_model(K.Adam(1e-2))
    state = go_on(model, bridge.optimizer(model.optimizer))
    bridge.to_keras(state, model).save(tmp_path / "model.keras")
    np.savez(tmp_path / "data.npz", x=X, y=Y)
    code = (
        "import sys, keras, numpy as np\n"
        "model, data = keras.models.load_model(sys.argv[1]), np.load(sys.argv[2])\n"
        "model.fit(data['x'], data['y'], batch_size=8, verbose=0, shuffle=False)\n"
        "assert 'bridge' not in sys.modules and int(model.optimizer.iterations) == 16\n"
        "every = [*model.trainable_variables, *model.optimizer.variables]\n"
        "np.save(sys.argv[3], np.concatenate([np.ravel(v.value) for v in every]))\n"
    )
    files = [str(tmp_path / name) for name in ("model.keras", "data.npz", "out.npy")]
    subprocess.run([sys.executable, "-c", code, *files], check=True)
    whole = values(fit(make_model(K.Adam(1e-2)), 2))
    np.testing.assert_allclose(np.load(files[2]), whole, rtol=2e-4, atol=1e-5)


FROZEN: dict[str, tuple[Callable[[], Any], Callable[[Any], Any]]] = {
    "wrapped": (lambda: K.Adam(1e-2), lambda m: bridge.optimizer(m.optimizer, model=m)),
    "OptaxOptimizer": (lambda: bridge.OptaxOptimizer(optax.adam(1e-2)), lambda m: m.optimizer.tx),
}


def train_frozen(model: keras.Model, tx: Any) -> ft.TrainState:
    """One epoch in the loop of functrain in which layer "z" stays as it is."""
    frozen = ft.freeze(bridge.from_keras(model), "z/**")
    params, model_state = frozen.init(jax.random.key(0), X[:1])
    state = ft.TrainState.create(params=params, model_state=model_state, tx=tx)
    step = ft.train_step(ft.supervised(frozen, bridge.loss("mse")), tx)
    return ft.fit(state, step, ft.ArrayLoader((X, Y), 8), verbose=0).state


@pytest.mark.parametrize("how", FROZEN)
def test_a_frozen_model_comes_home_with_the_slots_of_what_was_trained(how: str) -> None:
    optimizer, make_tx = FROZEN[how]
    model = fit(make_model(optimizer()), 2)
    held = {v.path: np.array(v.value) for v in (*model.variables, *model.optimizer.variables)}
    state = train_frozen(model, make_tx(model))
    bridge.to_keras(ft.merge_frozen(state), model, optimizer="require")
    for v in (*model.variables, *model.optimizer.variables):
        is_same = np.array_equal(v.value, held[v.path])
        of_z = "z/" in v.path or "z_" in v.path
        assert is_same == (of_z or v.path.endswith("learning_rate")), v.path
    for v in model.get_layer("a").variables:
        np.testing.assert_array_equal(v.value, state.params["a"][v.name])
    before = model.evaluate(X, Y, verbose=0)
    assert fit(model).evaluate(X, Y, verbose=0) < before


@pytest.mark.parametrize("is_trained", [{"kernel": True, "bias": True}, True])
def test_a_state_that_was_masked_leaves_the_slots_of_the_others_alone(is_trained: Any) -> None:
    mask = {"a": is_trained, "z": jax.tree.map(lambda x: not x, is_trained)}
    model = fit(make_model(K.Adam(1e-2)))
    state = bridge.create_state(model, optax.masked(bridge.optimizer(model.optimizer), mask))
    held = {v.path: np.array(v.value) for v in model.optimizer.variables}
    bridge.to_keras(state, model, optimizer="require")
    for v in model.optimizer.variables:
        if "z_" in v.path:
            np.testing.assert_array_equal(v.value, held[v.path])
        elif "a_" in v.path:
            assert not np.any(v.value), v.path


def test_the_error_about_a_frozen_state_says_to_merge_it() -> None:
    model = make_model(K.Adam(1e-2))
    state = train_frozen(model, optax.adam(1e-2))
    with pytest.raises(ValueError, match=r"(?s)z/kernel: missing.*merge_frozen\(state\)"):
        bridge.to_keras(state, model)


@pytest.mark.parametrize(
    ("theirs", "tx"),
    [
        (lambda: K.Adam(1e-2), optax.adam(1e-2)),
        (lambda: K.Adam(1e-2, amsgrad=True), bridge.optimizer(K.Adam(1e-2))),
        (lambda: bridge.OptaxOptimizer(optax.adam(1e-2)), optax.lion(1e-3)),
    ],
)
def test_slots_that_tx_cannot_hold_are_refused_if_required(theirs: Any, tx: Any) -> None:
    model = fit(make_model(theirs()))
    name = type(model.optimizer).__name__
    message = rf"(?s){name} cannot hold this state of optax.*optimizer=\"new\""
    with pytest.raises(ValueError, match=message):
        bridge.create_state(model, tx, optimizer="require")


@pytest.mark.parametrize(
    ("ours", "theirs"),
    [
        (K.Adamax, K.Adam),
        (lambda: K.RMSprop(momentum=0.9), lambda: K.SGD(momentum=0.9)),
        (lambda: K.RMSprop(momentum=0.9), K.Adam),
        (K.Lion, lambda: K.SGD(momentum=0.9)),
        (lambda: K.SGD(0.1), lambda: K.Adam(1e-3)),
    ],
    ids=["Adamax and Adam", "RMSprop and SGD", "RMSprop and Adam", "Lion and SGD", "no slots"],
)
def test_the_state_of_another_optimizer_leaves_that_of_the_model(ours: Any, theirs: Any) -> None:
    model = fit(make_model(theirs()))
    state = bridge.create_state(model, bridge.optimizer(ours()))
    state = state.replace(params=jax.tree.map(lambda p: p + 1, state.params))
    before = [np.array(v.value) for v in (*model.variables, *model.optimizer.variables)]
    with pytest.raises(ValueError, match="cannot hold this state of optax"):
        bridge.to_keras(state, model, optimizer="require")
    after = [v.value for v in (*model.variables, *model.optimizer.variables)]
    assert all(map(np.array_equal, before, after))
    bridge.to_keras(state, model)
    slots = [v.value for v in model.optimizer.variables]
    assert all(map(np.array_equal, before[len(model.variables) :], slots))
    assert not np.array_equal(model.variables[0].value, before[0])


def test_an_optimizer_that_is_not_built_or_missing_is_refused_if_required() -> None:
    model = make_model(K.Adam())
    with pytest.raises(ValueError, match="has not been built"):
        bridge.create_state(model, bridge.optimizer(model.optimizer), optimizer="require")
    model = keras.Sequential([keras.Input((3,)), layers.Dense(2)])
    state = bridge.create_state(model, optax.adam(1e-3))
    with pytest.raises(ValueError, match="not been compiled"):
        bridge.to_keras(state, model, optimizer="require")
    with pytest.raises(ValueError, match="'require' or 'leave', got 'required'"):
        bridge.to_keras(state, model, optimizer="required")


def test_a_state_whose_slots_were_donated_leaves_the_model_as_it_is() -> None:
    model = fit(make_model(K.Adam(1e-2)))
    state = bridge.create_state(model, bridge.optimizer(model.optimizer))
    state = state.replace(params=jax.tree.map(lambda p: p + 1, state.params))
    state.opt_state.slots["momentums"]["a"]["kernel"].delete()
    before = values(model)
    with pytest.raises(ValueError, match=r"opt_state/slots/momentums/a/kernel.*donation"):
        bridge.to_keras(state, model)
    np.testing.assert_array_equal(values(model), before)
