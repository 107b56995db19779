"""What Keras's private names for variables and scopes mean (checked with Keras 3.15.1)."""

from bridge import keras_private  # isort: skip  # before keras: it chooses the backend

import jax
import jax.numpy as jnp
import keras
import numpy as np
import pytest


def test_values_are_moved_without_a_copy() -> None:
    variable = keras.Variable([1.0, 2.0])
    (value,) = keras_private.variables.read([variable])
    assert value is variable.value
    keras_private.variables.write([variable], [None])
    assert keras_private.variables.read([variable]) == [None]
    new = jnp.ones(2)
    keras_private.variables.write([variable], [new])
    assert variable.value is new


def test_other_values_of_variables_are_put_back_after_an_error():
    variable = keras.Variable(np.zeros(2))
    seen = []

    def fail() -> None:
        with keras_private.variables.temporary_values([(variable, np.ones(2))]):
            seen.append(variable.value)
            raise KeyError

    with pytest.raises(KeyError):
        fail()
    np.testing.assert_array_equal(seen, [np.ones(2)])
    np.testing.assert_array_equal(variable.value, np.zeros(2))


def test_values_are_put_back_if_only_some_could_be_replaced():
    variable = keras.Variable(np.zeros(2))

    def pairs():
        yield variable, np.ones(2)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt), keras_private.variables.temporary_values(pairs()):
        pass
    np.testing.assert_array_equal(variable.value, np.zeros(2))


def test_layout_of_a_variable_is_what_it_was_made_with():
    assert keras_private.variables.layout(keras.Variable(0.0)) is None
    sharding = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    assert keras_private.variables.layout(keras.Variable(0.0, layout=sharding)) is sharding


def test_a_variable_can_be_made_outside_of_scopes():
    with keras.StatelessScope():
        with pytest.raises(ValueError, match="stateless scope"):
            keras.Variable(1.0)
        with keras_private.variables.outside_scopes():
            variable = keras.Variable(1.0)
        variable.assign(2.0)
    assert float(variable.value) == 1.0


def test_the_global_seed_is_brought_back():
    keras.utils.set_random_seed(1)
    keras.random.normal((2,))
    state = keras_private.variables.global_seed()
    expected = np.asarray(keras.random.normal((2,)))
    keras.random.normal((2,))
    keras_private.variables.set_global_seed(state)
    np.testing.assert_array_equal(keras.random.normal((2,)), expected)
    keras_private.variables.set_global_seed(None)
