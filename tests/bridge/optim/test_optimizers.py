"""bridge.optimizer is the Keras optimizer it was made of, on any params."""

import bridge  # isort: skip  # before keras: it chooses the backend

from typing import Any

import jax
import jax.numpy as jnp
import keras
import numpy as np
import optax
import pytest
from keras import layers

from bridge.optim._optimizers import Wrapped
from bridge.optim._slots import KerasOptState
from tests.bridge.optimizer_cases import CASES, ByKeras, K, make_params, wild_gradients

QUICK = ("SGD nesterov, decay", "AdamW without biases", "Muon", "LossScaleOptimizer")


def sample(names: Any) -> list[Any]:
    return [n if n in QUICK else pytest.param(n, marks=pytest.mark.long) for n in names]


def test_the_cases_are_all_of_keras_optimizers() -> None:
    named = {name.split()[0] for name in CASES}
    all_of_them = {
        name
        for name, cls in vars(K).items()
        if isinstance(cls, type) and issubclass(cls, K.Optimizer) and cls is not K.Optimizer
    }
    assert named == all_of_them


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", sample(CASES))
def test_every_step_has_kerass_slots_to_the_bit_and_its_params_within_two_roundings(name, dtype):
    theirs = ByKeras(CASES[name](), make_params(dtype))
    tx = bridge.optimizer(CASES[name]())
    params = make_params(dtype)
    state = tx.init(params)
    assert same(flat(name, state, params), theirs.slots)

    @jax.jit
    def step(grads, state, params):
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    misses, numbers = 0, 0
    for grads in wild_gradients(params):
        params = theirs.treedef.unflatten(theirs.params)  # each step from where Keras is
        scaled = theirs.scaled(grads)
        new, state = step(grads, state, params)
        theirs.step(scaled)
        assert same(flat(name, state, params), theirs.slots)
        misses += require_two_roundings(theirs.params, new, params, dtype)
        numbers += sum(p.size for p in theirs.params)
    assert misses < 0.05 * numbers


def flat(name: str, state: Any, params: Any) -> list[Any]:
    return Wrapped(CASES[name](), None).built_for(params).to_values(state)


def same(a: Any, b: Any) -> bool:
    pairs = zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True)
    return all(
        x.dtype == y.dtype and np.array_equal(np.asarray(x), np.asarray(y), equal_nan=True)
        for x, y in pairs
    )


def require_two_roundings(theirs: Any, ours: Any, before: Any, dtype: str) -> int:
    """Holds each number to the bound of the docstring, and counts those that are not equal."""
    misses = 0
    eps = float(jnp.finfo(dtype).eps)
    for x, y, old in zip(*map(jax.tree.leaves, (theirs, ours, before)), strict=True):
        x, y, old = (np.asarray(v, np.float64) for v in (x, y, old))
        equal = (x == y) | (np.isnan(x) & np.isnan(y))
        bound = 2 * eps * np.maximum(np.abs(x), np.abs(old))
        assert np.all(equal | (np.abs(x - y) <= bound))
        misses += int(np.sum(~equal))
    return misses


def test_a_number_that_keeps_its_sign_and_half_its_size_is_hit_exactly():
    rng = np.random.default_rng(0)
    old = jnp.asarray(rng.normal(size=10_000), jnp.float32)
    grads = jnp.asarray(rng.uniform(-50, 0.5, 10_000), jnp.float32) * old
    tx = bridge.optimizer(K.SGD(1.0))
    updates, _ = tx.update(grads, tx.init(old), old)
    assert np.array_equal(optax.apply_updates(old, updates), old - grads)


@pytest.mark.smoke
def test_it_runs_under_scan_and_vmap_with_a_learning_rate_of_each_ones_own():
    tx = bridge.optimizer(K.AdamW(1e-2))
    params = make_params()
    rates = jnp.asarray([1e-2, 1e-1])

    def train(rate):
        state = tx.init(params)
        state.scalars["learning_rate"] = rate

        def step(carry, scale):
            params, state = carry
            updates, state = tx.update(jax.tree.map(lambda p: p * scale, params), state, params)
            return (optax.apply_updates(params, updates), state), None

        return jax.lax.scan(step, (params, state), jnp.arange(1.0, 6.0))[0]

    both = jax.jit(jax.vmap(train))(rates)
    for i, rate in enumerate(rates):
        one = jax.jit(train)(rate)
        for a, b in zip(jax.tree.leaves(both), jax.tree.leaves(one), strict=True):
            np.testing.assert_allclose(a[i], b, rtol=1e-6, atol=1e-7)


def test_init_is_pure_and_the_keras_optimizer_stays_as_it_is():
    theirs = K.Adam(1e-2)
    tx = bridge.optimizer(theirs)
    specs = jax.eval_shape(tx.init, make_params())
    assert specs.slots["momentums"]["dense"]["kernel"].shape == (4, 3)
    first, second = tx.init(make_params()), jax.jit(tx.init)(make_params())
    assert same(first, second)
    assert not theirs.built
    assert len(theirs.variables) == 2
    theirs.learning_rate = 0.5
    assert float(tx.init(make_params()).scalars["learning_rate"]) == np.float32(1e-2)


def test_slots_are_where_their_params_are():
    mesh = jax.make_mesh((2,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))
    sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("x"))
    params = {"w": jax.device_put(jnp.ones((4, 3)), sharding)}
    state = bridge.optimizer(K.Adam()).init(params)
    assert state.slots["velocities"]["w"].sharding == sharding


def constrained() -> keras.Model:
    dense = layers.Dense(4, kernel_constraint=keras.constraints.MaxNorm(0.5), name="a")
    return keras.Sequential([keras.Input((3,)), dense, layers.Dense(2, name="b")])


def test_with_a_model_updates_end_within_its_constraints_as_kerass_do():
    model, theirs = constrained(), K.SGD(0.5, momentum=0.9)
    tx = bridge.optimizer(theirs, model=model)
    state = bridge.create_state(model, tx)  # without the warning
    theirs.build(model.trainable_variables)
    for i in range(5):
        grads = jax.tree.map(lambda p, i=i: jnp.sin(p * 10 + i), state.params)
        state = state.apply_gradients(grads, tx)
        theirs.apply([jnp.sin(v.value * 10 + i) for v in model.trainable_variables])
    for v in model.trainable_variables:
        layer, name = v.path.split("/")[-2:]
        np.testing.assert_allclose(state.params[layer][name], v.value, rtol=1e-6, atol=1e-7)
    assert float(jnp.linalg.norm(state.params["a"]["kernel"], axis=0).max()) <= 0.5 + 1e-6


@pytest.mark.parametrize("kind", [K.AdamW, bridge.OptaxOptimizer])
def test_it_takes_a_part_of_a_model_s_params(kind):
    net = [layers.Dense(3, kernel_constraint="non_neg", name=name) for name in ("a", "b", "c")]
    model = keras.Sequential([keras.Input((3,)), *net])
    keras_optimizer = K.AdamW(0.1) if kind is K.AdamW else kind(optax.adamw, learning_rate=0.1)
    tx = bridge.optimizer(keras_optimizer, model=model)
    labels = {"a": "train", "b": {"kernel": "train", "bias": "freeze"}, "c": "freeze"}

    def trained(tx):
        state = bridge.create_state(model, tx)
        for _ in range(2):
            state = state.apply_gradients(jax.tree.map(jnp.ones_like, state.params), tx)
        return state.params

    before, whole = bridge.create_state(model, tx).params, trained(tx)
    assert np.min(whole["a"]["kernel"]) == 0
    part = trained(optax.multi_transform({"train": tx, "freeze": optax.set_to_zero()}, labels))
    expected = {"a": whole["a"], "b": {**before["b"], "kernel": whole["b"]["kernel"]}}
    jax.tree.map(np.testing.assert_array_equal, part, {**expected, "c": before["c"]})


def test_constraints_of_a_model_go_with_any_optax_chain():
    model = constrained()
    with pytest.warns(UserWarning, match=r"a/kernel\n.*bridge.constraints\(model\)"):
        bridge.create_state(model, optax.adam(1.0))
    tx = optax.chain(optax.adam(1.0), bridge.constraints(model))
    state = bridge.create_state(model, tx)
    state = state.apply_gradients(jax.tree.map(jnp.ones_like, state.params), tx)
    assert float(jnp.linalg.norm(state.params["a"]["kernel"], axis=0).max()) <= 0.5 + 1e-6
    np.testing.assert_allclose(state.params["b"]["bias"], -1.0, rtol=1e-5)
    with pytest.raises(ValueError, match="expected params"):
        tx.update(state.params, state.opt_state)


def test_an_update_that_would_overflow_at_the_loss_scale_is_skipped():
    tx = bridge.optimizer(K.LossScaleOptimizer(K.SGD(0.5)))
    params = {"w": jnp.ones(3)}
    state = tx.init(params)
    updates, new = tx.update({"w": jnp.full(3, jnp.inf)}, state, params)
    assert np.all(updates["w"] == 0)
    scale = "loss_scale/dynamic_scale"
    assert new.scalars[scale] == state.scalars[scale] / 2


def test_arguments_that_do_not_fit_are_refused():
    tx, params = bridge.optimizer(K.Adam()), make_params()
    with pytest.raises(ValueError, match=r"update\(grads, opt_state, params\)"):
        tx.update(params, tx.init(params))
    for state in (optax.adam(1e-3).init(params), bridge.optimizer(K.SGD()).init(params)):
        with pytest.raises(ValueError, match=r"the state of bridge.optimizer\(Adam\)"):
            tx.update(params, state, params)
    with pytest.raises(ValueError, match=r"params of the model.*got\n  dense/bias"):
        bridge.optimizer(K.Adam(), model=constrained()).init(params)
    by_identity = K.AdamW(0.1)
    by_identity.exclude_from_weight_decay(var_list=constrained().weights)
    with pytest.raises(ValueError, match=r"names of variables.*got '4 in var_list='"):
        bridge.optimizer(by_identity)
    with pytest.raises(TypeError, match=r"expected a keras\.optimizers\.Optimizer"):
        bridge.optimizer(optax.adam(1e-3))


def test_a_multi_optimizer_may_choose_by_a_function():
    model, inner = constrained(), K.SGD(0.1)
    tx = bridge.optimizer(K.MultiOptimizer(lambda variable: inner), model=model)
    assert isinstance(bridge.create_state(model, tx).opt_state, KerasOptState)
    assert not inner.built


@pytest.mark.parametrize("make", ["optimizer", "constraints"])
def test_a_transformation_of_one_instance_updates_the_state_of_another(make):
    def build():
        kernel = {"kernel_constraint": "non_neg"}
        return keras.Sequential([keras.Input((3,)), layers.Dense(2, **kernel), layers.Dense(2)])

    model, other = build(), build()
    tx = bridge.optimizer(K.SGD(1.0), model=model)
    if make == "constraints":
        tx = optax.chain(optax.sgd(1.0), bridge.constraints(model))
    state = bridge.create_state(other, tx)
    state = state.apply_gradients(jax.tree.map(jnp.ones_like, state.params), tx)
    kernels = {path: layer["kernel"] for path, layer in state.params.items()}
    assert float(jnp.min(kernels[other.layers[0].name])) == 0
    assert float(jnp.min(kernels[other.layers[1].name])) < 0
