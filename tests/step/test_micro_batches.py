import itertools

import chex
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import functrain as ft

from ..conftest import digest
from ..model.test_combinators import dots

RNG = np.random.default_rng(0)
X = RNG.normal(size=(10, 6)).astype(np.float32)
Y = RNG.integers(0, 3, 10).astype(np.int32)
W = np.array([1, 0, 2, 0.5, 0, 0, 0, 0, 3, 1], np.float32)  # a whole micro-batch weighs nothing
LOSS = optax.softmax_cross_entropy_with_integer_labels


class Net(nn.Module):
    norm: bool = False

    @nn.compact
    def __call__(self, x, train):
        x = nn.Dense(8)(x)
        if self.norm:
            x = nn.BatchNorm(use_running_average=not train, momentum=0.5)(x)
        x = nn.Dropout(0.5 * self.norm, deterministic=not train)(nn.relu(x))
        self.sow(
            "losses", "l2", 1e-2 * jnp.mean(self.variables["params"]["Dense_0"]["kernel"] ** 2)
        )
        return nn.Dense(3)(x)


MODEL = ft.from_linen(Net())
PARAMS, STATE = MODEL.init(jax.random.key(0), X)


def gradient(loss_fn, params, model_state, *batch, rng=None):
    @jax.jit
    def found(params):
        return jax.value_and_grad(
            lambda p: loss_fn(p, model_state, *batch, rng=rng, training=True), has_aux=True
        )(params)

    (loss, aux), grads = found(params)
    return loss, aux, grads


@pytest.mark.parametrize("reduction", ["mean", "weighted_mean"])
@pytest.mark.parametrize("weights", [(), (W,)], ids=["plain", "weighted"])
@pytest.mark.parametrize("size", [1, 4, 5])
def test_the_gradient_is_that_of_the_large_batch(size, weights, reduction) -> None:
    loss_fn = ft.supervised(MODEL, LOSS, reduction=reduction)
    batch = (X, Y, *weights)
    loss, aux, grads = gradient(loss_fn, PARAMS, STATE, batch)
    cut = gradient(ft.micro_batches(loss_fn, size), PARAMS, STATE, batch)
    np.testing.assert_allclose(cut[0], loss, rtol=1e-6)
    np.testing.assert_allclose(cut[1].outputs, aux.outputs, rtol=1e-5, atol=1e-6)
    chex.assert_trees_all_close(cut[2], grads, rtol=1e-5, atol=1e-7)


def test_batch_statistics_and_keys_go_from_one_micro_batch_to_the_next() -> None:
    model = ft.from_linen(Net(norm=True))
    params, model_state = model.init(jax.random.key(0), X)
    loss_fn = ft.supervised(model, LOSS)
    key = jax.random.key(7)
    loss, aux, grads = gradient(ft.micro_batches(loss_fn, 4), params, model_state, (X, Y), rng=key)
    total, summed, state = 0.0, jax.tree.map(np.zeros_like, params), model_state
    for i, part in enumerate((slice(0, 8, 2), slice(1, 8, 2), slice(8, 10))):
        n = len(X[part])
        value, found, g = gradient(
            loss_fn, params, state, (X[part], Y[part]), rng=jax.random.fold_in(key, i)
        )
        state = found.model_state
        total += n * float(value)
        summed = jax.tree.map(lambda s, x, n=n: s + n * x, summed, g)
    np.testing.assert_allclose(loss, total / 10, rtol=1e-6)
    expected = jax.tree.leaves((jax.tree.map(lambda s: s / 10, summed), state))
    for a, b in zip(jax.tree.leaves((grads, aux.model_state)), expected, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-7)


def test_one_micro_batch_is_the_loss_itself_to_the_bit() -> None:
    loss_fn = ft.supervised(MODEL, LOSS)
    jaxprs = [
        str(jax.make_jaxpr(lambda p, f=f: f(p, STATE, (X, Y), rng=None, training=True))(PARAMS))
        for f in (loss_fn, ft.micro_batches(loss_fn, 10), ft.micro_batches(loss_fn, 99))
    ]
    assert len(set(jaxprs)) == 1


def test_no_forward_pass_is_run_twice() -> None:
    def program(loss_fn, n):
        def grads(params):
            return jax.grad(
                lambda p: loss_fn(p, STATE, (X[:n], Y[:n]), rng=None, training=True)[0]
            )(params)

        return jax.make_jaxpr(grads)(PARAMS).jaxpr

    loss_fn = ft.supervised(MODEL, LOSS)
    alone = dots(program(loss_fn, 4))
    assert alone == 5  # two forward, three backward: none for the inputs
    assert dots(program(ft.micro_batches(loss_fn, 4), 8)) == alone


def test_memory_holds_one_micro_batch() -> None:
    widths = 512, 2048, 2048, 1
    params = [jnp.ones((a, b)) for a, b in itertools.pairwise(widths)]

    def loss_fn(params, model_state, x, *, rng, training):
        for w in params:
            x = jnp.tanh(x @ w)
        return jnp.mean(x), ft.Aux(model_state)

    def temporary(loss_fn):
        grads = jax.grad(lambda p, x: loss_fn(p, (), x, rng=None, training=True)[0])
        x = jax.ShapeDtypeStruct((8192, widths[0]), jnp.float32)
        return jax.jit(grads).lower(params, x).compile().memory_analysis().temp_size_in_bytes

    activations = 8192 * 2 * 2048 * 4
    whole, cut = temporary(loss_fn), temporary(ft.micro_batches(loss_fn, 256))
    assert whole > activations
    # The gradients, twice over, and the activations of 256 examples.
    size = sum(p.nbytes for p in params)
    assert cut < 3 * size + activations / 8


def test_narrow_gradients_are_added_in_float32() -> None:
    def loss_fn(params, model_state, x, *, rng, training):
        return jnp.mean(params * x.astype(jnp.bfloat16)).astype(jnp.float32), ft.Aux(model_state)

    x = np.array([256.0] + [1.0] * 255, np.float32)
    _, _, grad = gradient(ft.micro_batches(loss_fn, 1), jnp.bfloat16(1.0), (), x)
    assert grad.dtype == jnp.bfloat16
    assert float(grad) == float(jnp.bfloat16(511 / 256))  # 1 + 255 / 256 in bfloat16: 256


def test_logs_are_averaged_by_weight_and_parts_without_weight_add_nothing() -> None:
    def loss_fn(params, model_state, batch, *, rng, training):
        x, w = batch
        mean = jnp.sum(params * x * w) / jnp.sum(w)  # 0 / 0 in the last micro-batch
        return mean, ft.Aux(model_state, logs={"mean": mean}, weight=jnp.sum(w))

    x, w = X[:9, 0], np.append(np.abs(X[:8, 1]), np.float32(0))
    loss, aux, grad = gradient(ft.micro_batches(loss_fn, 4), jnp.ones(()), (), (x, w))
    expected = np.average(np.float64(x), weights=w)
    np.testing.assert_allclose([loss, aux.logs["mean"], grad], [expected] * 3, rtol=1e-5)
    np.testing.assert_allclose(aux.weight, w.sum(), rtol=1e-6)


def test_it_trains_evaluates_and_does_not_depend_on_k() -> None:
    tx = optax.adam(1e-2)
    model = ft.from_linen(Net(norm=True))
    params, model_state = model.init(jax.random.key(0), X)
    loss_fn = ft.micro_batches(ft.supervised(model, LOSS), 2)
    step = ft.train_step(loss_fn, tx, metrics={"accuracy": ft.metrics.accuracy()})
    state = ft.TrainState.create(
        params=params, model_state=model_state, tx=tx, rng=jax.random.key(1)
    )
    data = ft.ArrayLoader((X, Y), 5)
    how = {"epochs": 3, "eval_data": data, "eval_step": ft.eval_step(loss_fn), "verbose": 0}
    runs = [ft.fit(state, step, data, fuse=k, **how) for k in (1, 4)]
    assert digest(runs[0].state) == digest(runs[1].state)
    found = ft.evaluate(runs[0].state, ft.eval_step(ft.supervised(model, LOSS)), data)
    assert runs[0].history.epochs["val_loss"][-1] == pytest.approx(found["loss"], rel=1e-5)


def test_members_of_a_population_are_cut_alike() -> None:
    loss_fn = ft.supervised(MODEL, LOSS)
    tx = optax.sgd(0.1)
    state = ft.TrainState.create(params=PARAMS, model_state=STATE, tx=tx)
    both = jax.tree.map(lambda x: jnp.stack([x, 2 * x]), state)

    def new(loss_fn):
        step = ft.train_step(loss_fn, tx)
        return jax.jit(jax.vmap(step, in_axes=(0, None)))(both, (X, Y))[0].params

    chex.assert_trees_all_close(
        new(ft.micro_batches(loss_fn, 4)), new(loss_fn), rtol=1e-5, atol=1e-7
    )


def two_devices(kind):
    types = (jax.sharding.AxisType[kind],)
    return jax.make_mesh((2,), ("data",), axis_types=types, devices=jax.devices()[:2])


@pytest.mark.parametrize("kind", ["Auto", "Explicit"])
def test_batches_on_several_devices_are_cut_alike(kind) -> None:
    tx = ft.tx.skip_non_finite(optax.sgd(0.1))
    state = ft.TrainState.create(params=PARAMS, model_state=STATE, tx=tx)
    # Not LOSS: in newer jax explicit meshes cannot differentiate its lookup of labels.
    loss_fn = ft.supervised(MODEL, optax.softmax_cross_entropy)
    step = ft.train_step(ft.micro_batches(loss_fn, 2), tx)
    data = ft.ArrayLoader((X[:6], np.eye(3)[Y[:6]].astype(np.float32)), 6)  # cut in three, on two
    alone, spread = (
        ft.fit(state, step, data, epochs=2, sharding=where, verbose=0).state
        for where in (None, two_devices(kind))
    )
    chex.assert_trees_all_close(alone, spread, rtol=1e-5, atol=1e-7)


def test_each_micro_batch_lies_on_all_devices() -> None:
    seen = set()

    def looking(params, model_state, x, *, rng, training):
        seen.add(tuple(jax.typeof(x).sharding.spec))
        return jnp.mean(params * x), ft.Aux(model_state)

    mesh = two_devices("Explicit")
    with jax.set_mesh(mesh):
        x = jax.device_put(X[:6], jax.sharding.NamedSharding(mesh, jax.P("data")))
        gradient(ft.micro_batches(looking, 2), jnp.ones(6), (), x)
    assert seen == {("data", None)}


def closed(params, model_state, x, *, rng, training):
    return jnp.mean(params * x), ft.Aux(model_state, params * x)


def scalar_output(params, model_state, x, *, rng, training):
    return jnp.mean(params * x), ft.Aux(model_state, {"mean": jnp.mean(x)})


@pytest.mark.parametrize(
    ("loss_fn", "size", "batch", "message"),
    [
        (closed, 0, X, "size: expected an integer of at least 1, got 0"),
        (closed, 2, (X, Y[:9]), r"share their first axis.*\n  0/0: float32\[10, 6\]\n  0/1: int32"),
        (closed, 2, (X, jax.random.key(0)), r"share their first axis"),
        (closed, 2, (), "got\n  no arrays"),
        (scalar_output, 2, X, r"a micro-batch, 2.*\n  outputs/mean: float32\[\]\nReturn scalars"),
    ],
)
def test_what_cannot_be_cut_is_refused(loss_fn, size, batch, message) -> None:
    with pytest.raises(ValueError, match=message):
        ft.micro_batches(loss_fn, size)(1.0, (), batch, rng=None, training=True)


def test_gradients_that_are_not_those_of_params_and_the_loss_are_refused() -> None:
    cut = ft.micro_batches(closed, 2)
    with pytest.raises(TypeError, match="goes through model_state, the batch or rng"):
        jax.grad(lambda x: cut(1.0, (), x, rng=None, training=True)[0])(X)
    with pytest.raises(TypeError, match="goes through Aux"):
        jax.grad(lambda p: cut(p, (), X, rng=None, training=True)[1].outputs.sum())(1.0)
