"""lora: adapters of low rank beside a frozen base."""

import os

import equinox as eqx
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
from .test_combinators import (
    DATA,
    LOSS,
    MODELS,
    TX,
    Net,
    NnxNet,
    X,
    Y,
    create,
    keras_net,
    update_of,
)

KEY = jax.random.key(3)


def trained(model, **how):
    step = ft.train_step(ft.supervised(model, LOSS), TX)
    return ft.fit(create(model), step, DATA, epochs=2, verbose=0, **how).state


def by_hand(kernel):
    """A model without a framework, of one matrix."""

    def apply(params, model_state, x, *, rng=None, training=False):
        return ft.ModelOutput(x @ params["kernel"], model_state)

    return ft.Model(lambda key, x: ({"kernel": kernel}, {}), apply)


@pytest.mark.parametrize("factored", [False, True])
@pytest.mark.parametrize(
    ("kind", "base_dtype"), [("linen", None), ("nnx", None), ("keras", None), ("linen", "int8")]
)
def test_only_adapters_are_trained_and_at_first_the_model_is_its_base(
    kind, base_dtype, factored
) -> None:
    model = MODELS[kind]()
    adapted = ft.lora(
        model, "body/**", "head/kernel", rank=2, base_dtype=base_dtype, factored=factored
    )
    state = create(adapted)
    shapes = {path: x.shape for path, x in jax.tree_util.tree_leaves_with_path(state.params)}
    assert sorted(shapes.values()) == [(2, 3), (2, 8), (6, 2), (8, 2)]
    slots = jax.tree.leaves(state.opt_state)
    assert sorted(x.shape for x in slots) == sorted([(), *shapes.values(), *shapes.values()])
    base = ft.merge_frozen(state).params if base_dtype else create(model).params
    if base_dtype is None:
        assert digest(state.model_state.frozen) == digest(base)
        assert digest(ft.merge_frozen(state).params) == digest(base)
    for training in (False, True):
        ours = adapted.apply(state.params, state.model_state, X, training=training)
        theirs = model.apply(base, create(model).model_state, X, training=training)
        assert digest(ours.outputs) == digest(theirs.outputs)
        assert digest(ours.model_state.model) == digest(theirs.model_state)
    end = trained(adapted)
    assert digest(end) == digest(trained(adapted, fuse=1))
    assert digest(end.model_state.frozen) == digest(state.model_state.frozen)
    assert all((x != 0).any() for x in jax.tree.leaves(end.params))


def keras_pair(layer, shape):
    """A layer as a model, and the same layer with Keras's own adapters."""
    keras.utils.set_random_seed(0)
    net = keras.Sequential([keras.Input(shape), layer])
    own = keras.models.clone_model(net)
    own.set_weights(net.get_weights())
    own.layers[0].enable_lora(2, lora_alpha=6)
    return net, own


@pytest.mark.parametrize("factored", [False, True])
@pytest.mark.parametrize(
    ("layer", "shape"),
    [
        (lambda: keras.layers.Dense(3, name="it"), (6,)),
        (lambda: keras.layers.EinsumDense("bhk,hkd->bd", 10, bias_axes="d", name="it"), (3, 4)),
    ],
    ids=["Dense", "EinsumDense"],
)
def test_outputs_and_gradients_are_those_of_kerass_own_adapters(layer, shape, factored) -> None:
    net, keras_model = keras_pair(layer(), shape)
    model = ft.lora(bridge.from_keras(net), "**", rank=2, alpha=6, factored=factored)
    x = np.random.default_rng(0).normal(size=(5, *shape)).astype("float32")
    adapters, model_state = model.init(KEY, x)
    # Keras reports no gradient for `a` as long as `b` is zero.
    kernel = jax.tree.map(lambda x: x + 0.3, adapters["it"]["kernel"])
    keras_model.layers[0].lora_kernel_a.assign(kernel["a"])
    keras_model.layers[0].lora_kernel_b.assign(kernel["b"])
    reference = bridge.from_keras(keras_model)
    their_params, their_state = reference.init(None, None)

    def loss(params, apply, model_state):
        return (apply(params, model_state, x).outputs ** 2).sum()

    adapters = {"it": {"bias": None, "kernel": kernel}}
    ours, grads = jax.value_and_grad(loss)(adapters, model.apply, model_state)
    theirs, their_grads = jax.value_and_grad(loss)(their_params, reference.apply, their_state)
    np.testing.assert_allclose(ours, theirs, rtol=1e-5)
    for name in "ab":
        got, expected = grads["it"]["kernel"][name], their_grads["it"][f"lora_kernel_{name}"]
        np.testing.assert_allclose(got, expected, rtol=1e-4, atol=1e-5)


def test_adapters_are_initialized_as_keras_initializes_them() -> None:
    net = keras.Sequential([keras.Input((600,)), keras.layers.Dense(50)])
    net.layers[0].enable_lora(40)
    theirs = np.asarray(net.layers[0].lora_kernel_a)
    model = ft.lora(by_hand(jnp.zeros((600, 50))), "kernel", rank=40)
    adapter = model.init(KEY, X)[0]["kernel"]
    limit = np.sqrt(6 / 600)
    for a in (theirs, adapter["a"]):
        assert 0.99 * limit < np.abs(a).max() <= limit
        np.testing.assert_allclose(np.std(a), limit / np.sqrt(3), rtol=0.02)
    assert not adapter["b"].any()
    other = ft.lora(by_hand(jnp.zeros((600, 50))), "kernel", rank=40).init(jax.random.key(4), X)[0]
    assert digest(other) != digest(adapter)


@pytest.mark.parametrize(
    ("shape", "a", "b"),
    [
        ((8, 3), (8, 2), (2, 3)),
        ((64, 4, 16), (64, 2), (2, 4, 16)),  # a query in attention
        ((4, 16, 64), (4, 16, 2), (2, 64)),  # its output
        ((3, 3, 32, 64), (3, 3, 32, 2), (2, 64)),  # a convolution
        ((16, 4, 16), (16, 4, 2), (2, 16)),  # a tie
    ],
)
def test_an_array_with_many_axes_is_a_matrix(shape, a, b) -> None:
    kernel = jax.random.normal(KEY, shape)
    model = ft.lora(by_hand(kernel), "**", rank=2)
    params, model_state = model.init(KEY, X)
    assert jax.tree.map(jnp.shape, params) == {"kernel": {"a": a, "b": b}}
    params = {"kernel": {"a": params["kernel"]["a"], "b": jax.random.normal(KEY, b)}}
    state = ft.TrainState.create(params=params, model_state=model_state, tx=TX)
    added = np.asarray(ft.merge_frozen(state).params["kernel"], np.float64) - np.float64(kernel)
    rows = np.prod(a[:-1])
    values = np.linalg.svd(added.reshape(rows, -1), compute_uv=False)
    assert (values > 1e-4).sum() == 2
    expected = np.reshape(params["kernel"]["a"], (rows, 2)) @ np.reshape(
        params["kernel"]["b"], (2, -1)
    )
    np.testing.assert_allclose(added.reshape(rows, -1), expected, rtol=1e-4, atol=1e-4)


def test_a_model_that_computes_with_integers_itself_is_a_base() -> None:
    def init(key, x):
        quantized = {"values": jnp.arange(18, dtype=jnp.int8).reshape(6, 3), "scale": jnp.ones(3)}
        return {"body": quantized, "head": jnp.eye(3)}, {}

    def apply(params, model_state, x, *, rng=None, training=False):
        body = params["body"]["values"].astype(x.dtype) * params["body"]["scale"]
        return ft.ModelOutput(x @ body @ params["head"], model_state)

    model = ft.lora(ft.Model(init, apply), "**", rank=2)
    end = trained(model)
    assert end.params["body"] == {"scale": None, "values": None}
    merged = ft.merge_frozen(end).params
    assert digest(merged["body"]) == digest(init(None, None)[0]["body"])
    assert (merged["head"] != jnp.eye(3)).any()


def test_a_trained_model_goes_to_keras_and_to_nnx() -> None:
    net = keras_net()
    model = ft.lora(bridge.from_keras(net), "**/kernel", rank=2, alpha=8)
    state = trained(model)
    bridge.to_keras(ft.merge_frozen(state), net)
    ours = jax.jit(model.apply)(state.params, state.model_state, X).outputs
    np.testing.assert_allclose(net.predict(X, verbose=0), ours, rtol=1e-5, atol=1e-6)

    module = NnxNet()
    wrapped = ft.lora(ft.from_nnx(module), "**/kernel", rank=2)
    state = trained(wrapped)
    merged = ft.merge_frozen(state)
    nnx.update(module, merged.params)
    nnx.update(module, merged.model_state)
    module.eval()
    ours = wrapped.apply(state.params, state.model_state, X).outputs
    np.testing.assert_allclose(module(X), ours, rtol=1e-5, atol=1e-6)


def test_it_combines_with_mixed_precision_and_freezing() -> None:
    model = ft.lora(ft.cast(ft.from_linen(Net(norm=False))), "**/kernel", rank=2)
    state = create(model)
    text = str(jax.make_jaxpr(update_of(model))(state, (X, Y)))
    assert "bf16[24,6] " in text
    inner = ft.freeze(ft.from_linen(Net(norm=False)), "body/**")
    state = trained(ft.lora(inner, "head/kernel", rank=2))
    whole = ft.merge_frozen(ft.merge_frozen(state))
    assert digest(whole.params["body"]) == digest(
        create(ft.from_linen(Net(norm=False))).params["body"]
    )


def test_adapters_are_saved_alone_and_the_base_is_filled_from_its_file(tmp_path) -> None:
    kernel = jax.random.normal(KEY, (512, 512))
    model = by_hand(kernel)
    adapted = ft.lora(model, "**", rank=2)
    base, state = create(model), create(adapted)
    ft.save(tmp_path / "base", base)
    ft.save(tmp_path / "adapters", state.params)
    size = sum(os.path.getsize(p) for p in (tmp_path / "adapters").rglob("*") if p.is_file())
    assert size < 4 * 2 * 2 * 512 + 4096 < kernel.nbytes / 50

    new = ft.lora(by_hand(jnp.zeros((512, 512))), "**", rank=2).init(jax.random.key(9), X)
    other = ft.TrainState.create(params=new[0], model_state=new[1], tx=TX)
    warm = ft.warm_start(other, tmp_path / "base").state
    warm = warm.replace(params=ft.load(tmp_path / "adapters", like=warm.params))
    assert digest((warm.params, warm.model_state)) == digest((state.params, state.model_state))
    # The base alone is not the trained model, so it does not fill one without adapters.
    ft.save(tmp_path / "adapted", state)
    with pytest.raises(ValueError, match="expected leaves to take"):
        ft.warm_start(base, tmp_path / "adapted")


PARTS = {
    "body": {"kernel": jnp.asarray(np.random.default_rng(5).normal(size=(4, 4)), jnp.float32)},
    # Keys like those of an adapter.
    "head": {"a": jnp.full((4, 2), 0.1), "b": jnp.zeros(2)},
}


def apply_parts(params, model_state, x, *, rng=None, training=False):
    hidden = jnp.tanh(x @ params["body"]["kernel"])
    return ft.ModelOutput(hidden @ params["head"]["a"] + params["head"]["b"], model_state)


@pytest.mark.parametrize("how", [{}, {"factored": True}, {"base_dtype": "int8"}])
@pytest.mark.parametrize("pattern", ["body/**", "**"])
def test_a_new_head_is_trained_whole_beside_the_adapters(how, pattern) -> None:
    x = np.random.default_rng(6).normal(size=(8, 4)).astype(np.float32)
    model = ft.Model(lambda key, x: (PARTS, {}), apply_parts)
    adapted = ft.lora(model, pattern, rank=2, train="head/**", **how)
    params, model_state = adapted.init(KEY, x)
    assert jax.tree.map(jnp.shape, params) == {
        "body": {"kernel": {"a": (4, 2), "b": (2, 4)}},
        "head": {"a": (4, 2), "b": (2,)},
    }
    tx = optax.sgd(0.1)
    state = ft.TrainState.create(params=params, model_state=model_state, tx=tx)
    step = jax.jit(ft.train_step(ft.supervised(adapted, optax.squared_error), tx))
    y = np.ones((8, 2), np.float32)
    for _ in range(3):
        state, _ = step(state, (x, y))
    merged = ft.merge_frozen(state).params

    base = ft.merge_frozen(
        ft.TrainState.create(params=params, model_state=model_state, tx=tx)
    ).params

    def loss(trained):
        kernel = base["body"]["kernel"] + trained["a"] @ trained["b"]
        outputs = apply_parts({"body": {"kernel": kernel}, "head": trained["head"]}, {}, x).outputs
        return jnp.mean((outputs - y) ** 2)

    by_hand = {**params["body"]["kernel"], "head": PARTS["head"]}
    for _ in range(3):
        by_hand = jax.tree.map(lambda w, g: w - 0.1 * g, by_hand, jax.grad(loss)(by_hand))
    kernel = base["body"]["kernel"] + by_hand["a"] @ by_hand["b"]
    np.testing.assert_allclose(merged["body"]["kernel"], kernel, rtol=1e-5, atol=1e-6)
    for name in ("a", "b"):
        np.testing.assert_allclose(merged["head"][name], by_hand["head"][name], rtol=1e-5)
        assert not np.array_equal(merged["head"][name], PARTS["head"][name])


def test_wrong_arguments_are_refused() -> None:
    model = ft.from_linen(Net())
    for message, patterns, options in [
        ("patterns: expected one or more", (), {}),
        ("rank: expected an integer of at least 1, got 0", "*", {"rank": 0}),
        (r"alpha: expected a positive number, .*got -1", "*", {"alpha": -1}),
        ("base_dtype: expected 'int8' or None, got 'int4'", "*", {"base_dtype": "int4"}),
        (r"patterns of .*got 'bodi/\*\*', which matches none.*body/\*\*", ["bodi/**"], {}),
        (r"train: .*got 'tail/\*\*', which matches none", ["body/**"], {"train": "tail/**"}),
        (r"floating-point matrices: .*got '\*\*/bias'", ["**/kernel", "**/bias"], {}),
    ]:
        with pytest.raises(ValueError, match=message):
            ft.lora(model, *patterns, **{"rank": 2, **options}).init(KEY, X)
    integers = by_hand(jnp.zeros((6, 3), jnp.int8))
    with pytest.raises(ValueError, match=r"floating-point matrices: .*got '\*\*'"):
        ft.lora(integers, "**", rank=2).init(KEY, X)


def test_a_state_that_is_whole_already_is_refused() -> None:
    state = create(ft.from_linen(Net()))
    for other in (state, state.params):
        with pytest.raises(ValueError, match="use it as it is"):
            ft.merge_frozen(other)


@pytest.mark.parametrize("kind", ["linen", "nnx", "equinox"])
def test_the_state_of_a_wrapped_model_is_refused_by_the_model_itself(kind) -> None:
    if kind == "equinox":
        model = ft.from_equinox(eqx.nn.MLP(6, 3, 8, depth=1, key=KEY))
    else:
        model = MODELS[kind]()
    state = create(ft.lora(model, "**", rank=1))
    with pytest.raises(ValueError, match=r"model_state: expected .*of merge_frozen\(state\)"):
        model.apply(state.params, state.model_state, X)
