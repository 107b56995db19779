"""bridge.OptaxOptimizer: optax inside `model.compile`, to the bit."""

import bridge  # isort: skip  # before keras: it chooses the backend

from typing import Any

import jax
import jax.numpy as jnp
import keras
import numpy as np
import optax
import optax.contrib
import pytest
from keras import layers

from bridge.model._names import variable_paths
from tests.bridge.optax_cases import ALL, QUICK, X, Y, by_hand, fitted, make_model, same

# Their step size comes of one sum over all params, whose last bit is the compiler's.
SUM_OVER_ALL = ("dadapt_adamw", "prodigy")


@pytest.mark.parametrize(
    "name", [n if n in QUICK else pytest.param(n, marks=pytest.mark.long) for n in ALL]
)
def test_fit_equals_optax_by_hand_to_the_bit(name: str) -> None:
    model = fitted(bridge.OptaxOptimizer(ALL[name]()))
    values, state = by_hand(ALL[name]())
    ours = [v.value for v in model.trainable_variables]
    if name in SUM_OVER_ALL:
        for a, b in zip(ours, values, strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-6, atol=1e-10)
        return
    assert same(ours, values)
    assert jax.tree.structure(model.optimizer.opt_state) == jax.tree.structure(state)
    assert same(model.optimizer.opt_state, state)


@pytest.mark.parametrize("make", [lambda: optax.adamw(1e-2), ALL["MultiSteps"]])
def test_bridge_fit_equals_fit_to_the_bit(make: Any) -> None:
    a, b = fitted(bridge.OptaxOptimizer(make())), fitted(bridge.OptaxOptimizer(make()), bridge.fit)
    assert same([v.value for v in a.variables], [v.value for v in b.variables])
    assert same(a.optimizer.opt_state, b.optimizer.opt_state)


@pytest.mark.smoke
def test_a_function_with_a_learning_rate_equals_what_it_makes() -> None:
    a = fitted(bridge.OptaxOptimizer(optax.adamw, learning_rate=1e-2, b1=0.8))
    b = fitted(bridge.OptaxOptimizer(optax.adamw(1e-2, b1=0.8)))
    assert same([v.value for v in a.trainable_variables], [v.value for v in b.trainable_variables])


def injected() -> list[Any]:
    ready_made = optax.chain(optax.clip(1.0), optax.inject_hyperparams(optax.sgd)(0.5))
    return [
        bridge.OptaxOptimizer(optax.sgd, learning_rate=0.5),
        bridge.OptaxOptimizer(ready_made),
    ]


@pytest.mark.parametrize("fit", [keras.Model.fit, bridge.fit])
@pytest.mark.parametrize("form", [0, 1])
def test_callbacks_change_the_injected_learning_rate(form: int, fit: Any) -> None:
    schedule = keras.callbacks.LearningRateScheduler(lambda epoch, rate: rate * 0.5)
    plateau = keras.callbacks.ReduceLROnPlateau("loss", factor=0.1, patience=1, min_delta=1e9)
    model = make_model()
    model.compile(injected()[form], "mse")
    history = fit(model, X, Y, epochs=3, verbose=0, callbacks=[schedule, plateau])
    np.testing.assert_allclose(history.history["learning_rate"], [0.25, 0.125, 0.00625], rtol=1e-6)
    rate = optax.tree.get(model.optimizer.opt_state, "learning_rate")
    np.testing.assert_allclose(rate, 0.000625, rtol=1e-6)


def test_a_schedule_is_the_learning_rate_that_keras_sees() -> None:
    schedule = keras.optimizers.schedules.InverseTimeDecay(0.5, 1, 1.0)
    for given in (schedule, bridge.schedule(schedule)):
        model = fitted(bridge.OptaxOptimizer(optax.sgd, learning_rate=given))
        np.testing.assert_allclose(model.optimizer.learning_rate, 0.5 / 9, rtol=1e-6)
        with pytest.raises(TypeError, match="schedule"):
            model.optimizer.learning_rate = 0.1


def test_the_learning_rate_can_be_set_before_and_after_the_build() -> None:
    optimizer = injected()[0]
    assert float(optimizer.learning_rate) == 0.5
    optimizer.learning_rate = 0.25
    optimizer.build(make_model().trainable_variables)
    assert float(optimizer.learning_rate) == 0.25
    optimizer.learning_rate = 0.125
    assert float(optax.tree.get(optimizer.opt_state, "learning_rate")) == 0.125


def test_loss_scaling_and_constraints_stay_kerass() -> None:
    layer = layers.Dense(2, kernel_constraint="non_neg")
    model = keras.Sequential([keras.Input((6,)), layer])
    model.compile(keras.optimizers.LossScaleOptimizer(bridge.OptaxOptimizer(optax.sgd(0.5))), "mse")
    model.fit(X, Y, epochs=2, verbose=0)
    assert np.all(np.asarray(layer.kernel) >= 0)
    assert int(model.optimizer.inner_optimizer.iterations) == 2


def test_frozen_layers_are_not_in_the_params() -> None:
    model = make_model()
    model.layers[0].trainable = False
    seen = []
    tx = optax.stateless_with_tree_map(lambda g, p: -0.1 * g)
    spy = optax.GradientTransformation(lambda p: seen.append(p) or tx.init(p), tx.update)
    model.compile(bridge.OptaxOptimizer(spy), "mse")
    model.fit(X, Y, verbose=0)
    assert jax.tree.map(jnp.shape, seen[0]) == {"b": {"bias": (2,), "kernel": (8, 2)}}


def test_slots_lie_where_their_variables_lie() -> None:
    devices = keras.distribution.DeviceMesh((2,), ["model"], keras.distribution.list_devices()[:2])
    layout = keras.distribution.LayoutMap(devices)
    layout["a/kernel"] = (None, "model")
    layout[".*a/kernel"] = (None, "model")
    with keras.distribution.ModelParallel(layout_map=layout).scope():
        model = fitted(bridge.OptaxOptimizer(optax.adam(1e-2)))
        adam = model.optimizer.opt_state[0]
        spec = jax.sharding.PartitionSpec(None, "model")
        assert model.layers[0].kernel.value.sharding.spec == spec
        assert adam.mu["a"]["kernel"].sharding.spec == spec
        assert adam.nu["b"]["kernel"].sharding.is_fully_replicated


class TestPaths:
    def test_they_are_those_of_create_state_where_layers_have_names_or_numbers(self, builders):
        for kind in ("sequential", "sequential_built_by_a_call", "functional"):
            for _ in range(2):
                model, _ = builders[kind]()
                keys = set(variable_paths(model.trainable_variables))
                state = bridge.create_state(model, optax.sgd(0.1))
                expected = jax.tree_util.tree_leaves_with_path(state.params)
                assert keys == {tuple(entry.key for entry in path) for path, _ in expected}

    def test_they_are_unique_and_the_same_in_every_instance_of_every_model(self, build):
        first, second = (variable_paths(build()[0].trainable_variables) for _ in range(2))
        assert first == second
        assert len(set(first)) == len(first)
