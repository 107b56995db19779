"""Reports about Keras models before they train: those of their steps, with Keras's names."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import keras
import numpy as np
import pytest

import bridge
import functrain as ft

X, Y = np.ones((32, 8), np.float32), np.zeros(32, np.int32)
SHAPES = jax.ShapeDtypeStruct((32, 8), jnp.float32), jax.ShapeDtypeStruct((32,), jnp.int32)


@pytest.fixture(scope="module")
def model() -> keras.Model:
    layers = [
        keras.Input((8,)),
        keras.layers.Dense(16, "relu", name="hidden"),
        keras.layers.BatchNormalization(name="norm"),
        keras.layers.Dense(4, name="logits"),
    ]
    made = keras.Sequential(layers, name="small")
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    made.compile(keras.optimizers.Adam(), loss, metrics=["accuracy"])
    return made


def test_memory_names_the_leaves_as_the_models_variables(model: keras.Model) -> None:
    found = bridge.memory(model, (X, Y))
    names = {name for name in found.leaves if not name.startswith(("optimizer", "metrics"))}
    weights = {variable.path for variable in model.weights}
    assert {name.partition("/")[2] for name in names} >= weights
    hidden = next(v for v in model.trainable_variables if v.path.endswith("hidden/kernel"))
    (size,) = (n for name, n in found.leaves.items() if name == f"trainable/{hidden.path}")
    assert size == 4 * 8 * 16
    assert not [name for name in found.leaves if name.rpartition("/")[2].isdigit()]


def test_layers_of_equal_names_are_counted_each() -> None:
    class Twins(keras.Model):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = (
                keras.layers.Dense(8, name="d"),
                keras.layers.Dense(8, name="d"),
            )

        def call(self, x: Any) -> Any:
            return self.second(self.first(x))

    model = Twins()
    model.compile("sgd", "mse")
    found = bridge.memory(model, (X, np.zeros((32, 8), np.float32)))
    assert found.state == sum(found.parts.values()) > 2 * 4 * (8 * 8 + 8)


def counts(cost: Any) -> Any:
    """Returns a cost without its time, which is NaN on a CPU."""
    return dataclasses.replace(cost, seconds=0.0)


def test_the_reports_are_those_of_keras_own_step(model: keras.Model) -> None:
    state, step = bridge.keras_state(model, (X, Y)), bridge.train_step(model)
    ours = bridge.memory(model, (X, Y), fuse=4)
    # `bridge.fit` moves the values out of the model's variables: there is no second original.
    theirs = ft.inspect.memory(state, step, (X, Y), fuse=4, donate=True)
    assert ours.original_state == 0
    assert (ours.total, ours.k, ours.parts) == (theirs.total, 4, theirs.parts)
    assert sorted(ours.leaves.values()) == sorted(theirs.leaves.values())
    cost = bridge.cost(model, (X, Y), fuse=4)
    assert counts(cost) == counts(ft.inspect.cost(state, step, (X, Y), fuse=4))
    # Forward, and the gradients of the kernels and of the second layer's inputs.
    assert cost.flops == 2 * 32 * (2 * 8 * 16 + 3 * 16 * 4)


def test_shapes_will_do(model: keras.Model) -> None:
    assert bridge.memory(model, SHAPES, fuse=4) == bridge.memory(model, (X, Y), fuse=4)
    of_shapes = bridge.cost(model, SHAPES, fuse=4)
    assert counts(of_shapes) == counts(bridge.cost(model, (X, Y), fuse=4))


def test_the_largest_batch_is_that_of_the_step(model: keras.Model) -> None:
    here = ft.target()
    target = dataclasses.replace(here, chip=here.chip._replace(memory_bytes=300 * 1024))
    found = bridge.largest_batch(model, SHAPES, multiple_of=64, fuse=4, target=target)
    assert found % 64 == 0
    assert bridge.memory(model, resized(found), fuse=4, target=target).fits
    larger = resized(found + 64)
    assert not bridge.memory(model, larger, fuse=4, target=target).fits


def resized(examples: int) -> Any:
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct((examples, *x.shape[1:]), x.dtype), SHAPES)


@pytest.mark.parametrize("x", [["a", "b"], np.array(["a", "b"]), 32, (32, 8)])
def test_data_that_are_no_numbers_are_refused_with_what_to_pass(x: Any, model: keras.Model) -> None:
    with pytest.raises(TypeError, match=r"batch: expected arrays of numbers, .*\(x, y\)"):
        bridge.memory(model, (x, Y))


def test_a_model_that_is_not_compiled_is_refused() -> None:
    model = keras.Sequential([keras.Input((8,)), keras.layers.Dense(1)])
    for report in (bridge.memory, bridge.cost, bridge.largest_batch):
        with pytest.raises(ValueError, match="compile"):
            report(model, (X, Y))
