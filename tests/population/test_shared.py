"""Members that share leaves: adapters of one frozen base."""

import functools
import os
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import functrain as ft

from . import setting
from .setting import CROSS_ENTROPY, KEY, METRICS, MODEL, X, Y, assert_close, bits, loader
from .test_on_chip import SHARED as CHUNK
from .test_on_chip import K

P = ft.population
MEMBERS = 8
RATES = np.geomspace(0.3, 0.01, MEMBERS).astype(np.float32)
BASE = MODEL.init(jax.random.key(5), X)
LORA = ft.lora(ft.Model(lambda key, x: BASE, MODEL.apply), "a", "b", rank=2, alpha=4)
TX = optax.inject_hyperparams(optax.adam)(learning_rate=0.1)
FACTORED = ft.lora(
    ft.Model(lambda key, x: BASE, MODEL.apply), "a", "b", rank=2, alpha=4, factored=True
)
STEP = ft.train_step(ft.supervised(LORA, CROSS_ENTROPY), TX, metrics=METRICS)
FACTORED_STEP = ft.train_step(ft.supervised(FACTORED, CROSS_ENTROPY), TX, metrics=METRICS)
EVAL = ft.eval_step(ft.supervised(LORA, CROSS_ENTROPY), metrics=METRICS)
SHARE = "model_state/frozen/**"
BASE_BYTES = sum(x.nbytes for x in jax.tree.leaves(BASE[0]))


def make_state(key: jax.Array, model: ft.Model = LORA) -> ft.TrainState:
    params, model_state = model.init(key, X)
    return ft.TrainState.create(params=params, model_state=model_state, tx=TX, rng=key)


def population(**how: Any) -> P.PopulationState:
    how = {"shared": SHARE, "hyperparameters": {"learning_rate": RATES}, **how}
    return P.create(make_state, KEY, **how)


alone = functools.partial(setting.alone, make_state=make_state, rates=RATES)


@functools.cache
def of_all(member: Any = STEP, **how: Any) -> Any:
    return P.step(member, **how)


def test_a_member_is_as_it_would_be_alone_and_the_base_is_stored_once() -> None:
    made = population()
    for i in range(MEMBERS):
        assert bits(made[i]) == bits(alone(i))
        assert jax.tree.structure(made[i]) == jax.tree.structure(alone(i))
    assert sum(x.nbytes for x in jax.tree.leaves(made.shared)) == BASE_BYTES
    assert {x.shape[0] for x in jax.tree.leaves(made.states)} == {MEMBERS}
    assert repr(made).endswith("active, states=2,104 in 23 arrays, shared=162 in 3 arrays)")
    stacked = P.stack([alone(i) for i in range(MEMBERS)], shared=[SHARE])
    assert bits(stacked) == bits(made)
    # A member has its own buffers, which outlive the population's.
    member = made[1]
    jax.tree.map(lambda x: x.delete(), made)
    assert bits(member) == bits(alone(1))


@pytest.mark.parametrize(
    ("block", "step"), [(None, STEP), (None, FACTORED_STEP), (1, STEP), (3, STEP)]
)
def test_each_of_eight_adapters_ends_as_it_would_alone(block, step) -> None:
    end, history = ft.fit(population(), of_all(step, block=block), loader(), epochs=2, verbose=0)
    losses = ft.evaluate(end, of_all(EVAL, block=block), loader())["loss"]
    for i in (0, 3, 7):
        single = ft.fit(alone(i), STEP, loader(), epochs=2, verbose=0)
        assert_close(end[i], single.state)
        np.testing.assert_allclose(
            history.steps["loss"][:, i], single.history.steps["loss"], rtol=1e-4
        )
        expected = ft.evaluate(single.state, EVAL, loader())["loss"]
        np.testing.assert_allclose(losses[i], expected, rtol=1e-4)
    assert bits(end.shared) == bits(population().shared)
    assert np.ptp(losses) > 0.01


def test_a_file_has_the_base_once(tmp_path) -> None:
    base = jax.random.normal(KEY, (256, 256))
    model = ft.Model(lambda key, x: ({"w": base}, {}), lambda *args, **mode: None)
    make = functools.partial(make_state, model=ft.lora(model, "w", rank=1))
    made = P.create(make, KEY, members=MEMBERS, shared=SHARE)
    ft.save(tmp_path / "all", made)
    size = sum(os.path.getsize(p) for p in (tmp_path / "all").rglob("*") if p.is_file())
    assert base.nbytes < size < base.nbytes * 1.5
    assert bits(ft.load(tmp_path / "all", like=made)) == bits(made)


def test_memory_is_that_of_one_base_and_eight_adapters() -> None:
    batch = X[:16], Y[:16]
    together = ft.inspect.memory(population(), of_all(), batch)
    single = ft.inspect.memory(alone(0), STEP, batch)
    own = single.state - BASE_BYTES
    assert together.state == BASE_BYTES + MEMBERS * (own + 1)  # and `active`
    assert together.parts["shared"] == BASE_BYTES
    assert together.leaves["shared/model_state/frozen/a"] == 8 * 16 * 4


@pytest.mark.parametrize("steps", [K, 2])
def test_blocks_that_stay_on_the_chip_share_the_base(steps) -> None:
    from functrain.engine._plan import nbytes
    from functrain.engine._programs import TRAINING, LoopOptions, program
    from functrain.population._blocks import count_blocks

    def train(on_chip_bytes: int) -> Any:
        options = LoopOptions(K, "off", "cpu", donate=False, on_chip_bytes=on_chip_bytes)
        carry = of_all().start(population())
        return program(of_all(), TRAINING, options)(carry, CHUNK, np.int32(steps))[:2]

    own = of_all().start(population().replace(shared=None))
    size = int(0.8 * nbytes(own))
    assert count_blocks(own, size) == 2
    assert_close(train(size + BASE_BYTES), train(0))
    assert_close(train(BASE_BYTES // 2), train(0))  # the base alone does not fit
    assert_close(train(10**9), train(0))


def test_members_lie_on_several_devices_beside_one_base_on_each() -> None:
    mesh = ft.sharding.mesh({"members": -1})
    by_member, on_each = (
        jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec(*axes))
        for axes in (["members"], [])
    )
    made = population()
    shared = jax.device_put(made.shared, on_each)
    divided = jax.device_put(made.replace(shared=None), by_member).replace(shared=shared)
    end = ft.fit(divided, of_all(), loader(), epochs=1, verbose=0).state
    for leaf in jax.tree.leaves((end.states, end.active)):
        assert leaf.sharding.spec[0] == "members"
    for leaf in jax.tree.leaves(end.shared):
        assert leaf.sharding.is_fully_replicated
        assert len(leaf.sharding.device_set) == mesh.size
    assert_close(end, ft.fit(made, of_all(), loader(), epochs=1, verbose=0).state)


def test_members_are_selected_resampled_stopped_and_predict() -> None:
    made = population()
    stop = P.EarlyStopping("val_loss", patience=1, restore_best=True)
    how = {"eval_data": loader(), "eval_step": of_all(EVAL), "hooks": [stop], "verbose": 0}
    end, _ = ft.fit(made, of_all(), loader(), epochs=4, **how)
    losses = ft.evaluate(end, of_all(EVAL), loader())["loss"]
    np.testing.assert_allclose(losses, stop.best, rtol=1e-5)
    best = P.select(end, losses, mode="min")
    assert best.model_state._fields == ("frozen", "model", "lora_scale")
    np.testing.assert_allclose(ft.evaluate(best, EVAL, loader())["loss"], losses.min(), rtol=1e-4)

    new = P.resample(end, losses, KEY, mode="min", perturb={"learning_rate": (0.5,)})
    worst = int(np.argmax(losses))
    assert bits(new[worst].params) == bits(best.params) or len(set(losses)) < MEMBERS
    assert bits(new.shared) == bits(end.shared)

    scales = np.linspace(0, 1, MEMBERS, dtype=np.float32)
    new = P.with_hyperparameters(end, {"model_state/lora_scale": scales})
    step = ft.predict_step(LORA)
    each = ft.predict(new, P.predict_step(step, combine="each"), ft.ArrayLoader(X, 32))
    np.testing.assert_allclose(
        each[:, 5], ft.predict(new[5], step, ft.ArrayLoader(X, 32)), rtol=1e-4, atol=1e-5
    )
    merged = ft.merge_frozen(new[5])
    theirs = MODEL.apply(merged.params, merged.model_state, X).outputs
    np.testing.assert_allclose(each[:, 5], theirs, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(each[:, 0], MODEL.apply(*BASE, X).outputs, rtol=1e-4, atol=1e-5)


def test_leaves_that_cannot_be_shared_are_refused() -> None:
    with pytest.raises(ValueError, match=r"shared: .*got 'frozen/\*\*', which matches none"):
        population(shared="frozen/**")
    with pytest.raises(TypeError, match=r"shared: expected patterns, .*got \[1\]"):
        population(shared=[1])
    # The base must not come from the key of a member.
    each_its_own = functools.partial(make_state, model=ft.lora(MODEL, "a", rank=2))
    with pytest.raises(
        ValueError, match=r"in member 1, got\n  model_state/frozen/a\n.*\nCreate .* outside"
    ):
        P.create(each_its_own, KEY, members=2, shared=SHARE)
    with pytest.raises(
        ValueError, match=r"in member 1, got\n  w: expected float32\[3\], got float32\[2"
    ):
        P.stack([{"w": jnp.zeros(3), "v": 1.0}, {"w": jnp.zeros(2), "v": 1.0}], shared="w")


def test_a_step_that_would_change_a_shared_leaf_is_refused() -> None:
    # The model counts the examples that it has seen.
    made = population(shared="model_state/**")
    for wrap in (lambda loss: loss, lambda loss: ft.micro_batches(loss, 2)):
        step = ft.train_step(wrap(ft.supervised(LORA, CROSS_ENTROPY)), TX)
        with pytest.raises(
            ValueError, match=r"shared: expected leaves that a step .*\n  model_state/model/seen\n"
        ):
            ft.fit(made, of_all(step), loader(), verbose=0)
        ft.fit(population(), of_all(step), loader(), verbose=0)
    ft.evaluate(made, of_all(EVAL), loader())
    with pytest.raises(ValueError, match=r"got\n  params/a/b\n(.*\n)*.*functrain\.lora\(model"):
        ft.fit(population(shared="params/a/b"), of_all(), loader(), verbose=0)
