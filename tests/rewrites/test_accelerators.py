"""The rewrites for TPUs, run on a CPU: what they replace, and that the numbers agree."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import keras
import numpy as np
import optax
import pytest
from jax import lax
from jax.extend.core import jaxpr_as_fun

from functrain.common._platform import compiling_for
from functrain.rewrites import _optimize, optimize
from functrain.rewrites._equations import walk_equations

from . import cases


def rewritten_for_tpu(fn: Callable[..., Any], *args: Any) -> Any:
    closed, failures = _optimize.rewrite_or_keep(jax.make_jaxpr(fn)(*args), "auto", "tpu")
    assert failures == []
    return closed


def primitives_of(jaxpr: Any) -> list[str]:
    return [eqn.primitive.name for eqn, *_ in walk_equations(jaxpr)]


def check(fn: Callable[..., Any], *args: Any) -> Any:
    """The results are as close to those in float64 as the results without rewrites."""
    closed = rewritten_for_tpu(fn, *args)
    with jax.enable_x64(True):
        wide = jax.tree.map(
            lambda x: np.asarray(x, np.float64) if x.dtype == np.float32 else x, args
        )
        exact = list(map(np.asarray, jax.tree.leaves(jax.jit(fn)(*wide))))
        exact_rewritten = jaxpr_as_fun(rewritten_for_tpu(fn, *wide))(*jax.tree.leaves(wide))
        # In float64 the two differ only by rounding.
        for x, y in zip(exact, exact_rewritten, strict=True):
            np.testing.assert_allclose(y, x, rtol=1e-12, atol=1e-12)
    plain = jax.tree.leaves(jax.jit(fn)(*args))
    got = jax.jit(jaxpr_as_fun(closed))(*jax.tree.leaves(args))
    for x, was, now in zip(exact, plain, got, strict=True):
        assert (now.shape, now.dtype) == (was.shape, was.dtype)
        error, error_was = (np.max(np.abs(np.asarray(a, np.float64) - x)) for a in (now, was))
        assert error <= 2 * error_was + 4 * np.finfo(np.float32).eps * (1 + np.max(np.abs(x)))
    return closed


def value_and_gradient(loss: Callable[..., Any]) -> Callable[..., Any]:
    return jax.value_and_grad(lambda x, *args: jnp.sum(loss(x, *args) ** 2))


cross_entropy = optax.softmax_cross_entropy_with_integer_labels


@pytest.mark.parametrize("shape", [(32, 10), (4, 8, 5), (2, 2)])
def test_the_log_probability_of_a_label_needs_no_gather(shape: tuple[int, ...]) -> None:
    rng = np.random.default_rng(0)
    labels = jnp.asarray(rng.integers(shape[-1], size=shape[:-1]))
    closed = check(value_and_gradient(cross_entropy), cases.normal(rng, shape), labels)
    gathers = [
        eqn
        for eqn, *_ in walk_equations(closed)
        # What is left takes the only column of a column.
        if eqn.primitive.name in ("gather", "scatter-add") and eqn.invars[0].aval.shape == shape
    ]
    assert gathers == []


def test_members_of_a_population_pick_their_own_labels() -> None:
    rng = np.random.default_rng(0)
    labels = jnp.asarray(rng.integers(5, size=(3, 8)))
    check(value_and_gradient(jax.vmap(cross_entropy)), cases.normal(rng, (3, 8, 5)), labels)


@pytest.mark.parametrize("mode", ["fill", "clip", "promise_in_bounds"])
def test_labels_outside_of_the_classes_are_treated_as_before(mode: Any) -> None:
    rng = np.random.default_rng(0)
    scores = cases.normal(rng, (8, 5)).at[2, 1].set(jnp.inf).at[3, 0].set(jnp.nan)
    # jax promises nothing for labels outside, if it is told that there are none.
    outside = [1, 2, 0, 4] if mode == "promise_in_bounds" else [-1, -6, 5, 99]
    labels = jnp.array([0, 4, *outside, 3, 2])

    def pick(x: jax.Array, y: jax.Array) -> tuple[jax.Array, Any]:
        def picked(x: jax.Array) -> jax.Array:
            return jnp.take_along_axis(x, y[:, None], axis=1, mode=mode)[:, 0]

        value, pull = jax.vjp(picked, x)
        return value, pull(jnp.arange(1.0, 9.0))

    closed = rewritten_for_tpu(pick, scores, labels)
    value, gradient = jaxpr_as_fun(closed)(scores, labels)
    np.testing.assert_array_equal(value, pick(scores, labels)[0])
    np.testing.assert_array_equal(gradient, pick(scores, labels)[1][0])


@pytest.mark.parametrize(("shape", "dtype"), [((8, 300), "uint8"), ((300,), "int32")])
def test_labels_too_narrow_for_the_classes_and_single_rows_are_kept(
    shape: tuple[int, ...], dtype: str
) -> None:
    rng = np.random.default_rng(0)
    rows = tuple(range(len(shape) - 1))
    numbers = lax.GatherDimensionNumbers((), (len(rows),), (len(rows),), rows, rows)
    ones = (1,) * len(shape)

    def pick(x: jax.Array, labels: jax.Array) -> jax.Array:
        return lax.gather(x, labels, numbers, ones, mode="promise_in_bounds")

    x, labels = cases.normal(rng, shape), rng.integers(200, size=(*shape[:-1], 1)).astype(dtype)
    closed = rewritten_for_tpu(pick, x, labels)
    assert "gather" in primitives_of(closed)
    np.testing.assert_array_equal(jaxpr_as_fun(closed)(x, labels)[0], pick(x, labels))


def test_labels_of_many_classes_are_gathered() -> None:
    fn = value_and_gradient(cross_entropy)
    for classes, is_kept in ((1024, False), (128_000, True)):
        args = jax.ShapeDtypeStruct((64, classes), "float32"), jax.ShapeDtypeStruct((64,), "int32")
        names = {
            eqn.primitive.name
            for eqn, *_ in walk_equations(rewritten_for_tpu(fn, *args))
            if eqn.invars and eqn.invars[0].aval.shape == (64, classes)
        }
        assert ("gather" in names, "scatter-add" in names) == (is_kept, is_kept)


def test_other_gathers_and_scatters_are_kept() -> None:
    def lookup(table: jax.Array, rows: jax.Array) -> jax.Array:
        return jnp.sum(table[rows] ** 2)

    def several(x: jax.Array, columns: jax.Array) -> jax.Array:
        return jnp.sum(jnp.take_along_axis(x, columns, axis=1) ** 2)

    x, rows = jnp.ones((8, 5)), jnp.zeros((8, 2), int)
    for fn in (jax.grad(lookup), jax.grad(several)):
        names = primitives_of(rewritten_for_tpu(fn, x, rows))
        assert "gather" in names
        assert "scatter-add" in names


def normalize(axes: tuple[int, ...]) -> Callable[..., Any]:
    def fn(x: jax.Array, scale: jax.Array) -> jax.Array:
        centered = x - jnp.mean(x, axes, keepdims=True)
        variance = jnp.var(x, axes, keepdims=True)
        return centered * lax.rsqrt(variance + 1e-3) * scale

    return fn


def test_a_number_that_is_not_finite_stays_in_every_gradient() -> None:
    rng = np.random.default_rng(0)
    x, scale = cases.normal(rng, (64, 32)).at[5, 3].set(jnp.nan), cases.normal(rng, (32,))
    fn = jax.value_and_grad(lambda *args: jnp.sum(normalize((0,))(*args) ** 2), (0, 1))
    got = jaxpr_as_fun(rewritten_for_tpu(fn, x, scale))(x, scale)
    for now, was in zip(got, jax.tree.leaves(fn(x, scale)), strict=True):
        np.testing.assert_array_equal(np.isnan(now), np.isnan(was))


@pytest.mark.parametrize(
    "layer", ["LayerNormalization", "GroupNormalization", "BatchNormalization"]
)
def test_normalizations_of_keras_keep_their_values_and_gradients(layer: str) -> None:
    model = getattr(keras.layers, layer)(**({"groups": 4} if layer[0] == "G" else {}))
    model.build((4, 6, 6, 8))
    training = {"training": True} if "Batch" in type(model).__name__ else {}
    rng = np.random.default_rng(0)

    def fn(params: Any, x: jax.Array) -> jax.Array:
        rest = [jnp.asarray(v.value, x.dtype) for v in model.non_trainable_variables]
        return model.stateless_call(params, rest, x, **training)[0]

    params = [cases.normal(rng, v.shape) for v in model.trainable_variables]
    x = cases.normal(rng, (4, 6, 6, 8))
    gradients = jax.grad(lambda *args: jnp.sum(fn(*args) ** 3), (0, 1))
    with jax.enable_x64(True):
        # Keras computes normalizations in float32.
        closed = rewritten_for_tpu(gradients, params, x)
        got = jaxpr_as_fun(closed)(*jax.tree.leaves((params, x)))
        for now, was in zip(got, jax.tree.leaves(gradients(params, x)), strict=True):
            np.testing.assert_allclose(now, was, rtol=2e-5, atol=2e-5 * np.max(np.abs(was)))


def test_what_is_computed_for_each_row_is_computed_after_the_broadcast() -> None:
    def fn(x: jax.Array) -> jax.Array:
        return x / (1 + jnp.sqrt(jnp.sum(x**2, axis=-1, keepdims=True)))

    x = cases.normal(np.random.default_rng(0), (16, 8))
    closed = check(fn, x)
    # The first one is not used any more: the compiler drops it.
    roots = [eqn.outvars[0].aval.shape for eqn in closed.eqns if eqn.primitive.name == "sqrt"]
    assert roots == [(16, 1), (16, 8)]
    (quotient,) = (eqn for eqn in closed.eqns if eqn.primitive.name == "div")
    assert [var.aval.shape for var in quotient.invars] == [(16, 8), (16, 8)]


@pytest.mark.parametrize("shape", [(2**10, 2**9), (1, 8)])
def test_rows_that_are_too_long_or_single_are_kept(shape: tuple[int, ...]) -> None:
    def fn(x: jax.Array) -> jax.Array:
        return x / (1 + jnp.sqrt(jnp.sum(x**2, axis=-1, keepdims=True)))

    closed = rewritten_for_tpu(fn, jnp.ones(shape))
    assert primitives_of(closed).count("sqrt") == 1


def image_classifier(key: jax.Array) -> tuple[Any, Callable[..., jax.Array]]:
    """A convolution with pooling, a normalization and two dense layers, as a loss of a batch."""
    shapes = {"conv": (3, 3, 1, 4), "dense": (64, 16), "scores": (16, 10)}
    keys = jax.random.split(key, len(shapes))
    params: dict[str, jax.Array] = {
        name: jax.random.normal(k, shape) / np.prod(shape[:-1]) ** 0.5
        for k, (name, shape) in zip(keys, shapes.items(), strict=True)
    }
    params |= {"conv bias": jnp.zeros(4), "scale": jnp.ones(16), "scores bias": jnp.zeros(10)}

    def loss(params: Any, batch: Any) -> jax.Array:
        images, labels = batch
        numbers = ("NHWC", "HWIO", "NHWC")
        x = lax.conv_general_dilated(
            images, params["conv"], (1, 1), "SAME", dimension_numbers=numbers
        )
        x = jax.nn.relu(x + params["conv bias"])
        x = lax.reduce_window(x, -jnp.inf, lax.max, (1, 2, 2, 1), (1, 2, 2, 1), "VALID")
        x = normalize((1,))(x.reshape(len(x), -1) @ params["dense"], params["scale"])
        scores = jax.nn.relu(x) @ params["scores"] + params["scores bias"]
        return jnp.mean(cross_entropy(scores, labels))

    return params, loss


def convolution(x: Any, kernel: Any, **options: Any) -> Any:
    numbers = ("NHWC", "HWIO", "NHWC")
    options = {"window_strides": (1, 1), "padding": ((2, 1), (0, 3)), **options}
    return lax.conv_general_dilated(x, kernel, dimension_numbers=numbers, **options)


def windows(jaxpr: Any) -> list[tuple[int, ...]]:
    """The shapes of the kernels of all convolutions."""
    convs = [e for e, *_ in walk_equations(jaxpr) if e.primitive.name == "conv_general_dilated"]
    return [tuple(np.take(e.invars[1].aval.shape, (0, 1))) for e in convs]


@pytest.mark.parametrize("features", [1, 3])
def test_a_convolution_with_few_features_is_one_of_each_axis(features: int) -> None:
    rng = np.random.default_rng(0)
    x = rng.normal(size=(24, 20, 24, 96)).astype(np.float32)
    kernel = rng.normal(size=(5, 4, 96, features)).astype(np.float32)
    assert windows(check(convolution, x, kernel)) == [(1, 4), (5, 1)]


@pytest.mark.parametrize(
    ("size", "features", "options"),
    [
        (8, 1, {}),
        (24, 5, {}),
        (24, 1, {"window_strides": (2, 2)}),
        (24, 1, {"rhs_dilation": (2, 2)}),
    ],
    ids=["small", "more features", "strides", "dilation"],
)
def test_other_convolutions_are_kept_whole(size: int, features: int, options: Any) -> None:
    x = jax.ShapeDtypeStruct((16, size, size, 96), jnp.float32)
    kernel = jax.ShapeDtypeStruct((5, 4, 96, features), jnp.float32)
    with compiling_for("tpu"):
        jaxpr = jax.make_jaxpr(optimize(lambda *args: convolution(*args, **options)))(x, kernel)
    assert windows(jaxpr) == [(5, 4)]


def test_weights_after_a_hundred_steps_are_those_of_the_plain_step() -> None:
    with jax.enable_x64(True):
        params, loss = image_classifier(jax.random.key(0))
        tx = optax.sgd(0.05, momentum=0.9)

        def step(state: Any, batch: Any) -> Any:
            params, opt_state = state
            value, grads = jax.value_and_grad(loss)(params, batch)
            updates, opt_state = tx.update(grads, opt_state, params)
            return (optax.apply_updates(params, updates), opt_state), value

        with compiling_for("tpu"):
            rewritten = optimize(step)
            rng = np.random.default_rng(0)
            labels = rng.integers(10, size=(100, 16))
            images = rng.normal(size=(100, 16, 8, 8, 1)) + labels[..., None, None, None] / 5
            state, batches = (params, tx.init(params)), (jnp.asarray(images), jnp.asarray(labels))
            assert str(jax.make_jaxpr(rewritten)(state, (images[0], labels[0]))).count("gather") < 3
            run = lambda step: jax.jit(lambda s, b: lax.scan(step, s, b))(state, batches)  # noqa: E731
            (plain, _), losses = run(step)
            (new, _), new_losses = run(rewritten)
        assert losses[-1] < losses[0]
        for x, y in zip(
            jax.tree.leaves((plain, losses)), jax.tree.leaves((new, new_losses)), strict=True
        ):
            np.testing.assert_allclose(y, x, rtol=1e-12, atol=1e-12)
