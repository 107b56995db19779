"""freeze, cast and remat: from one model to another."""

import chex
import flax.linen as nn
import jax
import jax.numpy as jnp
import keras
import numpy as np
import optax
import pytest
from flax import nnx

import bridge
import functrain as ft

from ..conftest import digest

RNG = np.random.default_rng(0)
X = RNG.normal(size=(24, 6)).astype(np.float32)
Y = RNG.integers(0, 3, 24).astype(np.int32)
DATA = ft.ArrayLoader((X, Y), 8)
LOSS = optax.softmax_cross_entropy_with_integer_labels


class Net(nn.Module):
    dtype: jnp.dtype | None = None
    norm: bool = True

    @nn.compact
    def __call__(self, x, train):
        x = nn.Dense(8, name="body", dtype=self.dtype)(x)
        if self.norm:
            x = nn.BatchNorm(use_running_average=not train, name="norm")(x)
        return nn.Dense(3, name="head", dtype=self.dtype)(nn.relu(x))


class NnxNet(nnx.Module):
    def __init__(self, dtype=None):
        rngs = nnx.Rngs(0)
        self.body = nnx.Linear(6, 8, rngs=rngs)
        self.norm = nnx.BatchNorm(8, dtype=dtype, rngs=rngs)
        self.head = nnx.Linear(8, 3, rngs=rngs)

    def __call__(self, x):
        return self.head(nnx.relu(self.norm(self.body(x))))


def keras_net():
    keras.utils.set_random_seed(0)
    return keras.Sequential(
        [
            keras.Input((6,)),
            keras.layers.Dense(8, name="body"),
            keras.layers.BatchNormalization(name="norm"),
            keras.layers.ReLU(),
            keras.layers.Dense(3, name="head"),
        ]
    )


MODELS = {
    "linen": lambda: ft.from_linen(Net()),
    "nnx": lambda: ft.from_nnx(NnxNet()),
    "keras": lambda: bridge.from_keras(keras_net()),
}
TX = optax.adam(1e-2)


def create(model, tx=TX):
    params, model_state = model.init(jax.random.key(0), X)
    return ft.TrainState.create(params=params, model_state=model_state, tx=tx)


def dots(jaxpr) -> int:
    """How many matrix products a program runs through, those of an inner one once."""
    inner = [p for eqn in jaxpr.eqns for p in jax.tree.leaves(list(eqn.params.values()))]
    inner = [getattr(p, "jaxpr", p) for p in inner if hasattr(getattr(p, "jaxpr", p), "eqns")]
    return sum(e.primitive.name == "dot_general" for e in jaxpr.eqns) + sum(map(dots, inner))


def update_of(model, tx=TX):
    loss_fn = ft.supervised(model, LOSS)
    return lambda state, batch: ft.update(state, loss_fn, tx, batch)[0]


@pytest.mark.parametrize("kind", MODELS)
def test_what_is_frozen_has_no_gradient_operation_and_no_slot(kind) -> None:
    model = MODELS[kind]()
    frozen = ft.freeze(model, "body/**", "norm/**")
    whole, part = create(model), create(frozen)
    batch = X[:8], Y[:8]
    # Forward two; backward the kernels, and what leads to the first.
    assert dots(jax.make_jaxpr(update_of(model))(whole, batch).jaxpr) == 5
    assert dots(jax.make_jaxpr(update_of(frozen))(part, batch).jaxpr) == 3
    paths = {path for path, _ in jax.tree_util.tree_leaves_with_path(part.params)}
    assert len(paths) == 2
    assert {x.shape for x in jax.tree.leaves(part.opt_state)} == {(), (8, 3), (3,)}


@pytest.mark.parametrize("kind", MODELS)
def test_a_frozen_model_is_the_model_and_trains_its_rest(kind) -> None:
    model = MODELS[kind]()
    frozen = ft.freeze(model, "body/*", "norm/*")
    begin = create(frozen)
    step = ft.train_step(ft.supervised(frozen, LOSS), TX)
    one, many = (ft.fit(begin, step, DATA, epochs=2, fuse=k, verbose=0).state for k in (1, 5))
    assert digest(one) == digest(many)

    # The reference: the whole model, and an optimizer that leaves the rest alone.
    params, model_state = model.init(jax.random.key(0), X)
    labels = {name: "head" if name == "head" else "rest" for name in params}
    tx = optax.partition({"head": TX, "rest": optax.set_to_zero()}, labels)
    state = ft.TrainState.create(params=params, model_state=model_state, tx=tx)
    state, _ = ft.fit(
        state, ft.train_step(ft.supervised(model, LOSS), tx), DATA, epochs=2, verbose=0
    )
    back = ft.merge_frozen(one)
    chex.assert_trees_all_close(
        (back.params, back.model_state), (state.params, state.model_state), rtol=1e-4, atol=1e-6
    )
    assert digest(back.params["body"]) == digest(params["body"])
    assert digest(back.params["head"]) != digest(params["head"])


def test_wrong_patterns_and_states_are_refused_in_words() -> None:
    model = ft.from_linen(Net())
    with pytest.raises(ValueError, match="patterns: expected one or more"):
        ft.freeze(model)
    with pytest.raises(
        ValueError, match=r"got 'bodi/\*\*', which matches none. Similar patterns: body/\*\*"
    ):
        ft.freeze(model, "bodi/**").init(jax.random.key(0), X)
    with pytest.raises(TypeError, match=r"patterns: expected patterns, .*got \(\['body'\],\)"):
        ft.freeze(model, ["body"])


@pytest.mark.parametrize(
    "make", [lambda model: ft.freeze(model, "body/**"), ft.cast, ft.remat, ft.predict_step]
)
def test_something_else_than_a_model_is_refused_with_the_ways_to_one(make) -> None:
    for argument in (Net(), Net, keras.layers.Dense(3)):
        with pytest.raises(TypeError, match=r"model: expected a functrain.Model.*from_linen"):
            make(argument)


def test_mixed_precision_is_flaxs_own() -> None:
    model = ft.cast(ft.from_linen(Net(norm=False)))
    theirs = ft.from_linen(Net(dtype=jnp.bfloat16, norm=False))
    params, _ = model.init(jax.random.key(0), X)
    assert {x.dtype for x in jax.tree.leaves(params)} == {jnp.dtype("float32")}
    ours = jax.jit(model.apply)(params, {}, X).outputs
    assert ours.dtype == jnp.float32
    np.testing.assert_array_equal(ours, jax.jit(theirs.apply)(params, {}, X).outputs)
    grads = [
        jax.jit(jax.grad(lambda p, m=m: jnp.mean(m.apply(p, {}, X).outputs ** 2, dtype="f4")))(
            params
        )
        for m in (model, theirs)
    ]
    for a, b in zip(*map(jax.tree.leaves, grads), strict=True):
        assert a.dtype == jnp.float32
        np.testing.assert_allclose(a, b, rtol=2e-2, atol=1e-3)


@pytest.mark.parametrize(
    "make",
    [lambda: ft.from_linen(Net()), lambda: ft.from_nnx(NnxNet(jnp.bfloat16))],
    ids=["linen", "nnx"],
)
def test_products_are_computed_in_half_precision_and_statistics_kept_in_float32(make) -> None:
    whole = make()
    model = ft.cast(whole)
    state = create(model)
    text = str(jax.make_jaxpr(update_of(model))(state, (X, Y)))
    products = [line for line in text.splitlines() if "= dot_general" in line]
    assert len(products) == 5
    assert all(":bf16[" in line for line in products)
    new = update_of(model)(state, (X, Y))
    assert [x.dtype for x in jax.tree.leaves(new)] == [x.dtype for x in jax.tree.leaves(state)]
    exact = update_of(whole)(state, (X, Y))
    chex.assert_trees_all_close(new.model_state, exact.model_state, rtol=1e-2, atol=1e-3)


def test_whole_numbers_are_not_cast() -> None:
    model = ft.cast(ft.from_linen(nn.Embed(300, 4)))
    tokens = jnp.array([257])  # 256 in bfloat16
    params, model_state = model.init(jax.random.key(0), tokens)
    row = params["embedding"][257].astype(jnp.bfloat16).astype(jnp.float32)
    np.testing.assert_array_equal(model.apply(params, model_state, tokens).outputs[0], row)
    with pytest.raises(TypeError, match="dtype: expected a floating-point type"):
        ft.cast(model, jnp.int8)


def test_outputs_that_are_python_numbers_come_through_a_cast() -> None:
    def apply(params, model_state, x, *, rng=None, training=False):
        outputs = {"y": x * params["w"], "temperature": 0.5, "count": 3}
        return ft.ModelOutput(outputs, {"calls": 2, "scale": 1.5}, (0.25,))

    model = ft.cast(ft.Model(init=None, apply=apply))
    params, x = {"w": jnp.ones(3)}, jnp.ones((2, 3))
    outputs, model_state, losses = model.apply(params, {"calls": 1, "scale": jnp.ones(())}, x)
    assert (outputs["temperature"], outputs["count"], losses) == (0.5, 3, (0.25,))
    assert outputs["y"].dtype == model_state["scale"].dtype == jnp.float32
    assert (model_state["calls"], model_state["scale"]) == (2, 1.5)


@pytest.mark.parametrize("kind", MODELS)
def test_remat_changes_what_is_kept_and_no_number(kind) -> None:
    model = MODELS[kind]()
    again = ft.remat(model, jax.checkpoint_policies.dots_saveable)
    new, expected = (jax.jit(update_of(m))(create(m), (X, Y)) for m in (again, model))
    chex.assert_trees_all_close(new, expected, rtol=1e-5, atol=1e-6)
    params, model_state = model.init(jax.random.key(0), X)

    def program(training, policy):
        m = ft.remat(model, policy)
        return jax.make_jaxpr(
            jax.grad(lambda p: m.apply(p, model_state, X, training=training).outputs.sum())
        )(params).jaxpr

    nothing = jax.checkpoint_policies.nothing_saveable
    assert dots(program(True, nothing)) > dots(program(True, jax.checkpoint_policies.dots_saveable))
    assert dots(program(False, nothing)) == dots(program(True, policy=lambda *_, **__: True))
