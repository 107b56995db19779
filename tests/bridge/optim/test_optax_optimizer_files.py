"""bridge.OptaxOptimizer in files, and what it refuses."""

import bridge  # isort: skip  # before keras: it chooses the backend

from typing import Any

import jax.numpy as jnp
import keras
import numpy as np
import optax
import optax.contrib
import pytest

from tests.bridge.optax_cases import SGD, C, X, Y, fitted, make_model, same


@pytest.mark.parametrize("suffix", [".keras", ".weights.h5"])
def test_state_is_saved_and_training_goes_on(tmp_path: Any, suffix: str) -> None:
    def make() -> Any:
        return bridge.OptaxOptimizer(
            optax.adam, learning_rate=1e-2, mu_dtype=jnp.bfloat16, nesterov=True
        )

    model = fitted(make())
    file = str(tmp_path / f"model{suffix}")
    if suffix == ".keras":
        model.save(file)
        again = keras.models.load_model(file)
    else:
        model.save_weights(file)
        again = make_model()
        again.compile(make(), "mse")
        again.optimizer.build(again.trainable_variables)
        again.load_weights(file)
    assert same(model.optimizer.opt_state, again.optimizer.opt_state)
    assert int(again.optimizer.iterations) == 8
    for each in (model, again):
        each.fit(X, Y, epochs=1, verbose=0, shuffle=False)
    assert same([v.value for v in model.variables], [v.value for v in again.variables])


@keras.saving.register_keras_serializable("tests")
def inner_frozen(learning_rate):
    """Freezes the layers of an inner model."""

    def label(params):
        def of_layer(layer):
            return {key: "frozen" if key == "sequential" else "trained" for key in layer}

        return {model: of_layer(layer) for model, layer in params.items()}

    parts = {"trained": optax.adam(learning_rate), "frozen": optax.set_to_zero()}
    return optax.multi_transform(parts, label)


def nested(optimizer):
    """One whose layers Keras names otherwise when it loads them."""
    keras.utils.set_random_seed(0)
    inner = keras.Sequential([keras.layers.Dense(3)])
    model = keras.Sequential([keras.Input((3,)), inner, keras.layers.Dense(3)])
    model.compile(optimizer, "mse")
    return model


DATA = np.random.default_rng(0).normal(size=(2, 32, 3)).astype(np.float32)


@pytest.mark.parametrize("make", [optax.adam, inner_frozen])
def test_a_nested_model_goes_on_as_it_was_after_loading(make, tmp_path):
    model = nested(bridge.OptaxOptimizer(make, learning_rate=0.01))
    model.fit(*DATA, verbose=0, shuffle=False)
    model.save(tmp_path / "model.keras")
    loaded = keras.saving.load_model(tmp_path / "model.keras")
    for each in (model, loaded):
        each.fit(*DATA, verbose=0, shuffle=False, epochs=3)
    for ours, theirs in zip(loaded.get_weights(), model.get_weights(), strict=True):
        np.testing.assert_array_equal(ours, theirs)


def test_slots_in_a_file_of_weights_do_not_depend_on_names(tmp_path):
    model, other = (nested(bridge.OptaxOptimizer(optax.adam(0.01))) for _ in range(2))
    model.fit(*DATA, verbose=0, shuffle=False)
    model.save_weights(tmp_path / "model.weights.h5")
    for number, variable in enumerate(other.trainable_variables):
        variable._path = f"layer_{9 - number}/{variable.name}"
    other.optimizer.build(other.trainable_variables)
    other.load_weights(tmp_path / "model.weights.h5")
    for each in (model, other):
        each.fit(*DATA, verbose=0, shuffle=False, epochs=3)
    for ours, theirs in zip(other.get_weights(), model.get_weights(), strict=True):
        np.testing.assert_array_equal(ours, theirs)


@pytest.mark.parametrize("kind", [float, np.float32, jnp.float32, np.asarray])
def test_a_config_has_the_learning_rate_of_now(kind):
    optimizer = bridge.OptaxOptimizer(optax.sgd, learning_rate=kind(0.5))
    nested(optimizer).fit(*DATA, verbose=0)
    optimizer.learning_rate = 0.25
    again = bridge.OptaxOptimizer.from_config(optimizer.get_config())
    assert float(again.learning_rate) == 0.25


def test_a_transformation_without_a_learning_rate_shows_none():
    optimizer = fitted(bridge.OptaxOptimizer(optax.adam(1e-2))).optimizer
    assert not hasattr(optimizer, "learning_rate")
    with pytest.raises(AttributeError, match=r"got none.*learning_rate=1e-3\)"):
        optimizer.learning_rate = 0.1


def test_saving_a_ready_made_transformation_is_refused(tmp_path):
    model = fitted(bridge.OptaxOptimizer(optax.adam(1e-2)))
    with pytest.raises(
        ValueError, match=r"cannot be written to a file.*OptaxOptimizer\(optax.adam, "
    ):
        model.save(tmp_path / "model.keras")
    model.save_weights(tmp_path / "model.weights.h5")


@pytest.mark.parametrize(
    ("make", "argument"),
    [
        (lambda: optax.linear_schedule(1.0, 0.0, 9), "learning_rate"),
        (lambda: SGD, "base_optimizer"),
    ],
)
def test_saving_a_closure_as_an_argument_is_refused(make, argument):
    function = optax.sgd if argument == "learning_rate" else C.mechanize
    ours = bridge.OptaxOptimizer(function, **{argument: make()})
    with pytest.raises(ValueError, match=rf"\['{argument}'\]: .* cannot be written"):
        ours.get_config()


@pytest.mark.parametrize(
    ("tx", "arguments", "message"),
    [
        (optax.adam(1e-3), {"b1": 0.8}, r"an existing transformation, got \['b1'\]"),
        (0.1, {}, "expected an optax transformation"),
        (lambda: 0.1, {}, "expected an optax transformation"),
        (optax.cosine_decay_schedule(0.1, 100), {}, "missing 1 required positional argument"),
        (optax.adam, {"learning_rates": 0.1}, "learning_rates"),
    ],
)
def test_what_is_no_transformation_is_refused(tx, arguments, message):
    with pytest.raises(TypeError, match=message):
        bridge.OptaxOptimizer(tx, **arguments)


def test_a_file_cannot_name_what_optax_does_not_have():
    config = {"name": "x", "tx": "optax.base64", "arguments": {}}
    with pytest.raises(ValueError, match=r"'optax\.base64'"):
        bridge.OptaxOptimizer.from_config(config)
