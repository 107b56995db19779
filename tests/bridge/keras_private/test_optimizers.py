"""What Keras's private names for optimizers mean (checked with Keras 3.15.1)."""

from bridge import keras_private  # isort: skip  # before keras: it chooses the backend

import keras
import numpy as np
import pytest


def test_settings_have_a_schedule_or_a_function_as_it_is():
    schedule = keras.optimizers.schedules.CosineDecay(0.1, 10)
    for rate in (schedule, float):
        optimizer = keras.optimizers.SGD(rate, momentum=0.9)
        settings = keras_private.optimizers.settings(optimizer)
        assert settings["learning_rate"] is rate
        assert settings["momentum"] == 0.9
    plain = keras.optimizers.SGD(0.1)
    assert keras_private.optimizers.settings(plain) == plain.get_config()


def test_optimizer_map_is_what_a_multi_optimizer_was_given():
    chosen = keras.optimizers.OptimizerMap(keras.optimizers.SGD(0.1))
    assert keras_private.optimizers.optimizer_map(keras.optimizers.MultiOptimizer(chosen)) is chosen


def test_excluded_from_weight_decay_are_ids_and_a_pattern():
    optimizer, variable = keras.optimizers.AdamW(), keras.Variable(0.0)
    assert keras_private.optimizers.excluded_from_weight_decay(optimizer) == (set(), "")
    optimizer.exclude_from_weight_decay(var_list=[variable], var_names=["bias"])
    excluded = keras_private.optimizers.excluded_from_weight_decay(optimizer)
    assert excluded == ({id(variable)}, "bias")


def test_slots_are_told_by_the_lists_and_attributes_that_hold_them():
    optimizer, variables = keras.optimizers.SGD(0.1, momentum=0.9), [keras.Variable(0.0)]
    assert keras_private.optimizers.trained_variables(optimizer) == []
    optimizer.build(variables)
    assert keras_private.optimizers.trained_variables(optimizer)[0] is variables[0]
    ((name, slots),) = keras_private.optimizers.slot_lists(optimizer)
    assert name == "momentums"
    assert slots[0] is optimizer.variables[2]
    names = keras_private.optimizers.variable_attributes(optimizer)
    assert [names[id(v)] for v in optimizer.variables[:2]] == ["iterations", "learning_rate"]


def test_backend_apply_gradients_is_called_once_with_all_that_have_gradients():
    class Spy(keras_private.optimizers.GradientsOnly):
        def update_all(self, grads, variables):
            self.seen = grads, [v.name for v in variables]

    spy = Spy(learning_rate=float)
    held = [keras.Variable(0.0, name="a"), keras.Variable(0.0, name="b")]
    held[1].overwrite_with_gradient = True
    spy.build(held)
    spy.apply([np.float32(1), np.float32(2)], held)
    assert spy.seen == ([1], ["a"])
    assert float(held[1].value) == 2
    assert int(spy.iterations) == 1


@pytest.mark.parametrize("is_scaled", [False, True])
def test_an_optimizer_refuses_another_number_of_variables_than_it_was_built_for(is_scaled):
    optimizer, (one, other) = keras.optimizers.SGD(), [keras.Variable(0.0) for _ in range(2)]
    optimizer = keras.optimizers.LossScaleOptimizer(optimizer) if is_scaled else optimizer
    optimizer.build([one])
    slots, values = ([v.value for v in x] for x in (optimizer.variables, (one, other)))
    with pytest.raises(ValueError, match="was built with 1 variables") as error:
        optimizer.stateless_apply(slots, values, values)
    assert keras_private.optimizers.is_of_other_variables(error.value)
    assert not keras_private.optimizers.is_of_other_variables(ValueError("another"))


def test_an_optimizer_is_unbuilt_after_a_build_that_failed():
    weights = [keras.Variable(np.zeros(3, np.float32)), keras.Variable(np.zeros(2, np.float32))]
    optimizer = keras.optimizers.LossScaleOptimizer(keras.optimizers.Adam())
    before = optimizer.variables

    class Failing(keras.Variable):
        overwrite_with_gradient = property(lambda self: 1 / 0)

    with pytest.raises(ZeroDivisionError), keras_private.optimizers.atomic_build(optimizer):
        optimizer.build([weights[0], Failing(np.zeros(2, np.float32))])
    assert not optimizer.built
    assert not optimizer.inner_optimizer.built
    assert [id(v) for v in optimizer.variables] == [id(v) for v in before]
    with keras_private.optimizers.atomic_build(optimizer):
        optimizer.build(weights)
    assert len(optimizer.variables) == len(before) + 2 + 4
