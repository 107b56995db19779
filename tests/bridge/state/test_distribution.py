"""Layouts of keras.distribution and rules of functrain say the same, either way."""

import bridge  # isort: skip  # before keras: it chooses the backend

import re
from typing import Any

import jax
import keras
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec as P
from keras import layers

import functrain as ft

X = np.random.default_rng(0).normal(size=(32, 8)).astype(np.float32)
Y = X[:, :4]


def mesh() -> jax.sharding.Mesh:
    return ft.sharding.mesh({"data": 1, "model": 2})


def by_hand() -> Any:
    devices = keras.distribution.DeviceMesh(
        (1, 2), ["data", "model"], keras.distribution.list_devices()
    )
    layout = keras.distribution.LayoutMap(devices)
    layout[".*up/kernel"] = (None, "model")
    layout[".*up/bias"] = ("model",)
    layout[".*down/kernel"] = ("model", None)
    return keras.distribution.ModelParallel(layout_map=layout, batch_dim_name="data")


RULE = ft.sharding.rules(
    {
        "**/up/kernel": P(None, "model"),
        "**/up/bias": P("model"),
        "**/down/kernel": P("model"),
        "**": ft.sharding.replicated,
    }
)


def fresh(optimizer: Any = "adam") -> keras.Model:
    keras.utils.set_random_seed(0)
    up, down = layers.Dense(16, "relu", name="up"), layers.Dense(4, name="down")
    norm, drop = layers.BatchNormalization(name="norm"), layers.Dropout(0.2, name="drop")
    model = keras.Sequential([keras.Input((8,)), up, norm, drop, down], name="net")
    model.compile(optimizer, "mse")
    return model


def specs(model: keras.Model) -> dict[str, Any]:
    found = {}
    for v in (*model.variables, *model.optimizer.variables):
        spec = tuple(v.value.sharding.spec)
        found[re.sub(r"_\d+", "", v.path)] = spec + (None,) * (v.value.ndim - len(spec))
    return found


def test_a_rule_places_a_model_and_its_slots_as_the_layout_map_does_and_trains_the_same() -> None:
    found = []
    for distribution in (by_hand(), bridge.to_distribution(mesh(), RULE)):
        with distribution.scope():
            model = fresh()
            history = bridge.fit(model, X, Y, batch_size=8, epochs=2, verbose=0)
            found.append((specs(model), history.history))
    assert found[0] == found[1]
    divided = [path for path, spec in found[0][0].items() if any(spec)]
    assert len(divided) == 3 * 3  # the weights, and two moments of each


def test_a_distribution_places_a_state_of_functrain_as_keras_places_the_model() -> None:
    tx = optax.adam(1e-3)
    plain = fresh()
    with by_hand().scope():
        model = fresh()
    for one in (plain, model):  # a model that lies there, and one that lies nowhere yet
        where = bridge.from_distribution(by_hand(), one)
        state = ft.sharding.put(bridge.create_state(one, tx), where.mesh, where.rule)
        assert where.batch.spec == P("data")
        kept = state.opt_state[0]
        for tree in (state.params, kept.mu, kept.nu):
            got = {path: x.sharding for path, x in ft.internal.tree.leaves_with_path(tree)}
            assert got["up/kernel"].spec == P(None, "model")
            assert got["down/kernel"].spec == P("model", None)
            assert got["norm/gamma"].is_fully_replicated
    loss_fn = ft.supervised(bridge.from_keras(model), optax.squared_error)
    loader = ft.ArrayLoader((X, Y), 8)
    state, _ = ft.fit(state, ft.train_step(loss_fn, tx), loader, sharding=where.batch, verbose=0)
    assert state.params["up"]["kernel"].sharding.spec == P(None, "model")


def test_fsdp_divides_what_a_layout_map_cannot_by_shape() -> None:
    rule = ft.sharding.fsdp(("data", "model"), min_size=32)
    with bridge.to_distribution(mesh(), rule).scope():
        model = fresh(bridge.OptaxOptimizer(optax.adam, learning_rate=1e-3))
        model.optimizer.build(model.trainable_variables)
    both = ("data", "model")
    of = specs(model)
    assert of["net/up/kernel"] == (None, both)
    assert of["net/down/kernel"] == (both, None)
    assert of["net/up/bias"] == (None,)
    slots = [v.value for v in model.optimizer.variables if v.value.shape == (8, 16)]
    assert [x.sharding.spec for x in slots] == [P(None, both)] * 2


def test_rules_that_leave_a_weight_out_or_fit_nothing_are_refused() -> None:
    part = bridge.to_distribution(mesh(), ft.sharding.rules({"**/kernel": P()}))
    with part.scope(), pytest.raises(ValueError, match="up/bias: expected a rule for this leaf"):
        fresh()
    rule = ft.sharding.rules({"**/kernle": P(), "**": P()})
    with bridge.to_distribution(mesh(), rule).scope():
        model = fresh()
        with pytest.raises(ValueError, match=r"(?s)first one that matches.*\*\*/kernle: perhaps"):
            bridge.fit(model, X, Y, verbose=0)
    odd = bridge.to_distribution(mesh(), ft.sharding.rules({"**": P("model")}))
    with odd.scope(), pytest.raises(ValueError, match="expected a spec that divides"):
        keras.Sequential([keras.Input((3,)), layers.Dense(3)])
    with pytest.raises(ValueError, match=r"batch: expected an axis of the mesh.*'rows'"):
        bridge.to_distribution(mesh(), RULE, batch="rows")


def test_batches_that_devices_do_not_divide_are_refused_before_the_first_step() -> None:
    with keras.distribution.DataParallel().scope():
        model = fresh()
        before = [np.asarray(v.value) for v in model.variables]
        with pytest.raises(ValueError, match=r"(?s)x: .*expected batches .* float32\[3, 8\]"):
            bridge.fit(model, X[:27], Y[:27], batch_size=8, verbose=0)
        for v, x in zip(model.variables, before, strict=True):
            np.testing.assert_array_equal(v.value, x)
