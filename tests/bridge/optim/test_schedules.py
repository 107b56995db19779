"""bridge.schedule: the same value at every step, in both directions."""

import bridge  # isort: skip  # before keras: it chooses the backend

import inspect
import json

import jax
import jax.numpy as jnp
import keras
import numpy as np
import optax
import pytest

S = keras.optimizers.schedules
STEPS = jnp.arange(1_000)

KERAS = {
    "ExponentialDecay": lambda: S.ExponentialDecay(0.1, 100, 0.5),
    "ExponentialDecay staircase": lambda: S.ExponentialDecay(0.1, 100, 0.5, staircase=True),
    "PiecewiseConstantDecay": lambda: S.PiecewiseConstantDecay([100, 500], [1.0, 0.5, 0.1]),
    "PolynomialDecay": lambda: S.PolynomialDecay(0.1, 700, 0.01, power=2.0),
    "PolynomialDecay cycle": lambda: S.PolynomialDecay(0.1, 300, 0.01, cycle=True),
    "InverseTimeDecay": lambda: S.InverseTimeDecay(0.1, 100, 0.5),
    "CosineDecay": lambda: S.CosineDecay(0.1, 700, 0.1),
    "CosineDecay warmup": lambda: S.CosineDecay(0.0, 700, 0.1, warmup_target=0.1, warmup_steps=99),
    "CosineDecayRestarts": lambda: S.CosineDecayRestarts(0.1, 100, 2.0, 0.9, 0.1),
}
OPTAX = {
    "constant_schedule": {"value": 0.1},
    "piecewise_constant_schedule": {
        "init_value": 1.0, "boundaries_and_scales": {100: 0.5, 500: 0.1},
    },
    "cosine_decay_schedule": {"init_value": 1.0, "decay_steps": 700, "alpha": 0.1},
    "join_schedules": {
        "schedules": [optax.constant_schedule(1.0), optax.linear_schedule(1.0, 0.0, 100)],
        "boundaries": [500],
    },
}  # fmt: skip


def test_these_are_all_schedules_of_keras():
    of_keras = {name for name, cls in vars(S).items() if inspect.isclass(cls)}
    assert {name.split()[0] for name in KERAS} == of_keras - {"LearningRateSchedule"}


@pytest.mark.parametrize("name", KERAS)
def test_a_keras_schedule_has_the_same_values_in_optax(name):
    theirs = KERAS[name]()
    ours = jax.vmap(bridge.schedule(theirs))(STEPS)
    assert ours.dtype == jnp.float32
    np.testing.assert_allclose(ours, jax.vmap(theirs)(STEPS), rtol=1e-7, atol=0)


@pytest.mark.parametrize("name", OPTAX)
def test_an_optax_schedule_has_the_same_values_in_keras(name):
    theirs = getattr(optax.schedules, name)(**OPTAX[name])
    ours = bridge.schedule(theirs)
    assert isinstance(ours, S.LearningRateSchedule)
    expected = jax.vmap(lambda step: jnp.asarray(theirs(step), jnp.float32))(STEPS)
    np.testing.assert_allclose(jax.vmap(ours)(STEPS), expected, rtol=1e-7, atol=0)


def test_a_keras_optimizer_asks_an_optax_schedule_for_its_rate_at_each_iteration():
    theirs = optax.warmup_cosine_decay_schedule(0.0, 1.0, 4, 8)
    optimizer = keras.optimizers.SGD(bridge.schedule(theirs))
    weight = keras.Variable(0.0)
    for step in range(10):
        before = float(weight.value)
        optimizer.apply([jnp.ones(())], [weight])
        np.testing.assert_allclose(before - float(weight.value), theirs(step), atol=1e-6)


def test_there_and_back_is_the_schedule_itself():
    theirs = optax.linear_schedule(1.0, 0.0, 10)
    assert bridge.schedule(bridge.schedule(theirs)) is theirs


@pytest.mark.parametrize("name", ["cosine_decay_schedule", "piecewise_constant_schedule"])
def test_a_schedule_by_name_and_arguments_is_written_to_a_config_and_read_back(name):
    ours = bridge.schedule(getattr(optax, name), **OPTAX[name])
    # As in a file, in which all keys are strings.
    config = json.loads(json.dumps(keras.saving.serialize_keras_object(ours)))
    again = keras.saving.deserialize_keras_object(config)
    np.testing.assert_array_equal(jax.vmap(again)(STEPS), jax.vmap(ours)(STEPS))


def test_a_closure_cannot_be_written_and_the_error_says_what_can():
    closure = bridge.schedule(optax.linear_schedule(1.0, 0.0, 10))
    with pytest.raises(
        ValueError, match=r"cannot be written to a file.*register_keras_serializable"
    ):
        keras.saving.serialize_keras_object(closure)
    nested = bridge.schedule(optax.join_schedules, **OPTAX["join_schedules"])
    with pytest.raises(ValueError, match="'schedules'"):
        keras.saving.serialize_keras_object(nested)


def test_what_is_no_schedule_is_refused():
    with pytest.raises(TypeError, match=r"optax.constant_schedule\(value\)"):
        bridge.schedule(0.1)
    with pytest.raises(TypeError, match="expected no arguments for a Keras schedule"):
        bridge.schedule(S.CosineDecay(0.1, 10), alpha=0.1)


@pytest.mark.parametrize("maker", [optax.cosine_decay_schedule, S.CosineDecay])
def test_what_makes_a_schedule_is_none(maker):
    with pytest.raises(TypeError, match=r"missing .* required positional argument.*decay_steps"):
        bridge.schedule(maker)
    with pytest.raises(TypeError, match="init_values"):
        bridge.schedule(maker, init_values=0.1)
