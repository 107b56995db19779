"""Rules over the params give the places of whole states, whatever the optimizer."""

from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AbstractMesh
from jax.sharding import PartitionSpec as P

import functrain as ft

MESH = AbstractMesh((4, 2), ("data", "model"))
PARAMS = {
    "embed": {"table": jax.ShapeDtypeStruct((512, 64), jnp.float32)},
    "block": {
        "up": {
            "kernel": jax.ShapeDtypeStruct((64, 256), jnp.float32),
            "bias": jax.ShapeDtypeStruct((256,), jnp.float32),
        },
        "down": {"kernel": jax.ShapeDtypeStruct((256, 64), jnp.float32)},
    },
}
RULE = ft.sharding.rules(
    {
        "**/up/kernel": P(None, "model"),
        "**/down/kernel": P("model"),
        "embed/**": ft.sharding.fsdp("data", min_size=1),
        "**": ft.sharding.replicated,
    }
)
SPECS = {
    "embed": {"table": P("data")},
    "block": {"up": {"kernel": P(None, "model"), "bias": P()}, "down": {"kernel": P("model")}},
}


def abstract(tx: optax.GradientTransformation, params: Any = PARAMS) -> Any:
    def make() -> ft.TrainState:
        zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), params)
        return ft.TrainState.create(params=zeros, tx=tx, rng=jax.random.key(0))

    return jax.eval_shape(make)


class Averaged(ft.TrainState):
    average: Any
    weight: Any = 1.0


def test_fields_of_a_subclass_follow_the_params_that_they_copy() -> None:
    def make() -> Averaged:
        zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), PARAMS)
        key = jax.random.key(0)
        return Averaged.create(params=zeros, tx=optax.adam(0.1), rng=key, average={"of": zeros})

    found = specs(ft.sharding.shardings(jax.eval_shape(make), MESH, RULE))
    assert found.params == found.average["of"] == found.opt_state[0].mu == SPECS
    assert found.step == found.rng == found.weight == P()


def specs(tree: Any) -> Any:
    return jax.tree.map(lambda where: where.spec, tree)


def kinds(params: Any) -> Any:
    return jax.tree_util.tree_map_with_path(
        lambda path, _: "matrix" if "kernel" in str(path) else "other", params
    )


# For each optimizer: how often it keeps something of the shape of each param.
OPTIMIZERS = {
    "sgd": (optax.sgd(0.1), 0),
    "adam": (optax.adam(1e-3), 2),
    "adafactor": (optax.adafactor(1e-3, min_dim_size_to_factor=10**6), 1),
    "chain": (optax.chain(optax.clip_by_global_norm(1.0), optax.adam(1e-3)), 2),
    "multi_steps": (optax.MultiSteps(optax.adam(1e-3), 4), 3),
    "injected": (optax.inject_hyperparams(optax.adam)(1e-3), 2),
    "averaged": (optax.chain(optax.adam(1e-3), ft.tx.ema(0.9)), 3),
    "guarded": (ft.tx.skip_non_finite(optax.adam(1e-3)), 2),
    "partition": (optax.partition({"matrix": optax.adam(1e-3), "other": optax.adam(1)}, kinds), 2),
    "lbfgs": (optax.lbfgs(memory_size=3), 3),
    "lookahead": (optax.contrib.schedule_free(optax.sgd(0.1), 0.1), 1),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_what_an_optimizer_keeps_of_a_param_follows_it(name: str) -> None:
    tx, copies = OPTIMIZERS[name]
    state = abstract(tx)
    found = ft.sharding.shardings(state, MESH, RULE)
    assert specs(found.params) == SPECS
    assert jax.tree.structure(found) == jax.tree.structure(state)
    wanted = {x.shape: spec for x, spec in zip(*map(jax.tree.leaves, (PARAMS, SPECS)), strict=True)}
    kept = dict.fromkeys(wanted, 0)
    for leaf, where in zip(*map(jax.tree.leaves, (state.opt_state, found.opt_state)), strict=True):
        stacked = P(None, *wanted.get(leaf.shape[1:], P()))
        assert tuple(where.spec) == tuple(wanted.get(leaf.shape, stacked if stacked[1:] else P()))
        if leaf.shape in kept:
            kept[leaf.shape] += 1
    assert kept == dict.fromkeys(wanted, copies)
    assert specs((found.step, found.rng)) == (P(), P())


def test_moments_that_are_factored_are_on_all_devices() -> None:
    found = ft.sharding.shardings(abstract(optax.adafactor(1e-3)), MESH, ft.sharding.fsdp())
    assert set(jax.tree.leaves(specs(found.opt_state))) == {P()}


def test_every_state_within_a_tree_is_divided_like_itself() -> None:
    both = {"generator": abstract(optax.adam(1e-3)), "critic": abstract(optax.sgd(0.1))}
    found = ft.sharding.shardings(both, MESH, RULE)
    assert specs(found["generator"].opt_state[0].mu) == SPECS
    assert specs(found["critic"].params) == SPECS


def test_fsdp_divides_the_largest_axis_that_divides_and_leaves_small_leaves_whole() -> None:
    def spec(*shape: int, axis: Any = "data", min_size: int = 100) -> P:
        rule = ft.sharding.fsdp(axis, min_size=min_size)
        return rule("w", jax.ShapeDtypeStruct(shape, jnp.float32), MESH)

    assert spec(8, 400) == P(None, "data")
    assert spec(400, 8) == P("data")
    assert spec(400, 401) == P("data")
    assert spec(16, 16) == P(None, "data")
    assert spec(9, 99) == P()  # nothing divides
    assert spec(4, 8) == P()  # small
    assert spec(12, 16, axis=("data", "model")) == P(None, ("data", "model"))


def test_a_state_is_made_in_its_places_with_the_values_it_has_without_them() -> None:
    def make() -> ft.TrainState:
        params = {"w": jax.random.normal(jax.random.key(0), (64, 32)), "b": jnp.zeros(3)}
        return ft.TrainState.create(params=params, tx=optax.adam(1e-3), rng=jax.random.key(1))

    mesh = ft.sharding.mesh({"data": 2})
    rule = ft.sharding.fsdp(min_size=64)
    plain = make()
    for state in (ft.sharding.create(make, mesh, rule), ft.sharding.put(plain, mesh, rule)):
        for part in (state.params, state.opt_state[0].mu):
            assert part["w"].sharding.spec == P("data")
            assert part["w"].addressable_shards[0].data.shape == (32, 32)
            assert part["b"].sharding.is_fully_replicated
        np.testing.assert_array_equal(state.params["w"], plain.params["w"])
    assert not plain.params["w"].is_deleted()


def test_training_a_divided_state_leaves_it_where_it_was_and_gives_the_same() -> None:
    def loss_fn(params: Any, model_state: Any, batch: Any, *, rng: Any, training: bool) -> Any:
        return jnp.mean((jnp.tanh(batch @ params["w"]) - 1) ** 2), ft.Aux(model_state)

    def make() -> ft.TrainState:
        params = {"w": jax.random.normal(jax.random.key(0), (8, 32))}
        return ft.TrainState.create(params=params, tx=tx)

    tx = optax.chain(optax.adam(0.01), ft.tx.ema(0.9))
    data = np.random.default_rng(0).standard_normal((64, 8)).astype(np.float32)
    mesh = ft.sharding.mesh({"data": 2})
    state = ft.sharding.create(make, mesh, ft.sharding.fsdp(min_size=1))
    step, loader = ft.train_step(loss_fn, tx), ft.ArrayLoader(data, 8)
    one = ft.fit(make(), step, loader, epochs=2, verbose=0)
    two = ft.fit(state, step, loader, epochs=2, sharding=mesh, verbose=0)
    wanted = ft.sharding.shardings(state, mesh, ft.sharding.fsdp(min_size=1))
    chex.assert_trees_all_equal(jax.tree.map(lambda x: x.sharding, two.state), wanted)
    np.testing.assert_allclose(two.state.params["w"], one.state.params["w"], atol=1e-5)


def test_numbers_of_a_tree_are_put_on_a_mesh_as_arrays() -> None:
    mesh = ft.sharding.mesh({"data": 2})
    state = ft.sharding.put({"scale": 2.0}, mesh, ft.sharding.fsdp())
    assert state["scale"] == 2
    assert state["scale"].sharding.is_fully_replicated


def test_rules_within_rules_are_asked_about_the_leaves_that_they_get() -> None:
    inner = ft.sharding.rules({"block/up/kernel": P(), "**": P("data")})
    outer = ft.sharding.rules({"**/bias": P(), "block/**": inner, "**": ft.sharding.replicated})
    found = ft.sharding.shardings(abstract(optax.sgd(0.1)), MESH, outer).params["block"]
    assert specs(found["down"]["kernel"]) == P("data")
    inner = ft.sharding.rules({"**/bias": P(), "**": P()})
    outer = ft.sharding.rules({"**/bias": P(), "**": inner})
    with pytest.raises(ValueError, match=r"rules: .*\n.*\*\*/bias: perhaps"):
        ft.sharding.shardings(abstract(optax.sgd(0.1)), MESH, outer)


def test_rules_under_several_patterns_are_asked_about_the_leaves_of_all_of_them() -> None:
    layer = {"kernel": jax.ShapeDtypeStruct((8, 4), jnp.float32)}
    params = {"encoder": layer | {"embedding": layer["kernel"]}, "decoder": layer}
    shared = ft.sharding.rules(
        {"**/kernel": P(None), "**/embedding": P("data"), "**": ft.sharding.replicated}
    )
    outer = ft.sharding.rules({"encoder/**": shared, "decoder/**": shared})
    found = ft.sharding.shardings(params, MESH, outer)
    assert specs(found["encoder"]["embedding"]) == P("data")


def test_meshes_are_made_of_sizes_by_name() -> None:
    assert dict(ft.sharding.mesh({"data": -1, "model": 2}).shape) == {"data": 1, "model": 2}
    assert dict(ft.sharding.mesh({"a": 1}, devices=jax.devices()[:1]).shape) == {"a": 1}
    auto, explicit = (ft.sharding.mesh({"data": 2}, explicit=x) for x in (False, True))
    assert auto.axis_types == (jax.sharding.AxisType.Auto,)
    assert explicit.axis_types == (jax.sharding.AxisType.Explicit,)


@pytest.mark.parametrize("axes", [{}, {"a": -1, "b": -1}, {"a": 0}, {"a": 3}, {"a": "2"}])
def test_sizes_that_make_no_mesh_are_refused(axes: Any) -> None:
    with pytest.raises(ValueError, match="axes: expected"):
        ft.sharding.mesh(axes)


@pytest.mark.parametrize(
    ("rule", "message"),
    [
        (ft.sharding.rules({"**/up/**": P()}), r"down/kernel: expected a rule for this leaf"),
        (ft.sharding.rules({"**/upp/**": P(), "**": P()}), r"(?s)each pattern.*\*\*/upp"),
        (lambda path, x, mesh: P("rows"), r"down/kernel: expected a spec that divides .*rows"),
        (lambda path, x, mesh: P(None, None, "data"), r"kernel: expected a spec of at most 2 axes"),
        (ft.sharding.fsdp("rows"), r"fsdp\('rows'\): expected axes of the mesh"),
    ],
)
def test_rules_that_do_not_fit_are_refused_by_leaf(rule: ft.sharding.Rule, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ft.sharding.shardings(abstract(optax.sgd(0.1)), MESH, rule)


def test_what_a_mesh_does_not_divide_is_refused_with_what_to_do() -> None:
    params = {"w": jax.ShapeDtypeStruct((6, 5), jnp.float32)}
    with pytest.raises(ValueError, match=r"w: expected a spec that divides float32\[6, 5\] .* 6 "):
        ft.sharding.shardings(params, MESH, ft.sharding.rules({"w": P("data")}))
    with pytest.raises(TypeError, match=r"patterns\['w'\]: expected a jax.sharding.PartitionSpec"):
        ft.sharding.rules({"w": "data"})  # type: ignore[dict-item]
