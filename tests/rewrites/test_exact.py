"""rewrites="exact": the bits of the jitted step, in every dtype, alone and in the loop."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from functrain.engine._loop import repeat
from functrain.inspect import explain_rewrites
from functrain.rewrites import optimize

from ..conftest import digest
from .cases import normal

DTYPES = ("float16", "bfloat16", "float32", "float64")
STEPS = 2
Step = Callable[[Any, jax.Array], tuple[Any, jax.Array]]


def conv(x: jax.Array, w: jax.Array, **options: Any) -> jax.Array:
    options = {"window_strides": (1, 1), "padding": "SAME", **options}
    return lax.conv_general_dilated(x, w, dimension_numbers=("NHWC", "HWIO", "NHWC"), **options)


def plain(x: jax.Array, w: jax.Array) -> jax.Array:
    return jnp.tanh(conv(x, w))


def strided(x: jax.Array, w: jax.Array) -> jax.Array:
    return jnp.tanh(conv(x, w, window_strides=(2, 2)))


def dilated(x: jax.Array, w: jax.Array) -> jax.Array:
    return jnp.tanh(conv(x, w, rhs_dilation=(2, 2)))


def transposed(x: jax.Array, w: jax.Array) -> jax.Array:
    return jnp.tanh(conv(x, w, padding=[(1, 2)] * 2, lhs_dilation=(2, 2)))


def biased(x: jax.Array, w: jax.Array) -> jax.Array:
    return lax.max(conv(x, w) + w[0, 0, 0], jnp.zeros((), x.dtype))


def normalised(x: jax.Array, w: jax.Array) -> jax.Array:
    """Converts the convolution's result at once, as batch normalisation does, and takes it too."""
    y = conv(x, w)
    wide = y.astype(jnp.promote_types(y.dtype, jnp.float32))
    return ((wide - wide.mean((0, 1, 2))) / (1 + jnp.std(wide))).astype(x.dtype) + y


def called(x: jax.Array, w: jax.Array) -> jax.Array:
    """Hands the convolution's result, and that of its gradient, to a function that converts it."""
    norm = jax.jit(lambda y: jnp.square(y.astype(jnp.promote_types(y.dtype, jnp.float32))))
    return norm(conv(x, w)).astype(x.dtype)


def recomputed(x: jax.Array, w: jax.Array) -> jax.Array:
    return jax.checkpoint(plain)(x, w)


def channels_first(x: jax.Array, w: jax.Array) -> jax.Array:
    """A forward convolution that is rewritten too, before an erf, which converts at once."""
    y = lax.conv(x.transpose(0, 3, 1, 2), w.transpose(3, 2, 0, 1), (1, 1), "SAME")
    return lax.erf(y).transpose(0, 2, 3, 1)


def grouped(x: jax.Array, w: jax.Array) -> jax.Array:
    """The first in 3 groups of one channel, the second in 4 of two."""
    groups = {3: 3, 8: 4}[x.shape[-1]]
    inputs, outputs = x.shape[-1] // groups, 9 if groups == 3 else 8
    w = jnp.tile(w, (1, 1, 1, 2))[:, :, :inputs, :outputs]
    return jnp.tanh(conv(x, w, feature_group_count=groups)[..., :8])


def depthwise(x: jax.Array, w: jax.Array) -> jax.Array:
    """One weight for each channel and place."""
    count = x.shape[-1]
    return jnp.tanh(conv(x, w[:, :, :1, :count], feature_group_count=count))


LAYERS = (plain, strided, biased, normalised, called, recomputed, channels_first)
LAYERS += (dilated, transposed)


def training(layer: Callable[..., jax.Array], dtype: str) -> tuple[Step, Any, jax.Array]:
    """Mixed precision, as Keras has it: weights of 32 bits or more, convolutions in `dtype`."""
    rng = np.random.default_rng(0)
    wide = jnp.promote_types(dtype, jnp.float32)
    params = [normal(rng, shape, wide) / 4 for shape in ((3, 3, 3, 8), (3, 3, 8, 8))]

    def loss(params: Any, x: jax.Array) -> jax.Array:
        for w in params:
            x = layer(x, w.astype(dtype))
        return jnp.mean(jnp.square(x.astype(wide)))

    def step(params: Any, x: jax.Array) -> tuple[Any, jax.Array]:
        value, grads = jax.value_and_grad(loss)(params, x)
        # A product with a power of two is not rounded. XLA may or may not round others, such as
        # 0.1 g, before they are subtracted: jax 0.12 in float64 does so alone, but not in a loop.
        return jax.tree.map(lambda p, g: p - 0.125 * g, params, grads), value

    return step, params, normal(rng, (STEPS, 8, 7, 7, 3), dtype)


def one_by_one(step: Step, params: Any, xs: jax.Array) -> str:
    step, losses = jax.jit(step), []
    for x in xs:
        params, loss = step(params, x)
        losses.append(loss)
    return digest((params, jnp.stack(losses)))


def fused(step: Step, params: Any, xs: jax.Array) -> str:
    loop = jax.jit(lambda params, xs, n: repeat(step, params, xs, STEPS, n, unfused=True))
    return digest(loop(params, xs, jnp.int32(len(xs))))


@pytest.mark.parametrize(
    ("layer", "dtype"),
    [(layer, "float32") for layer in LAYERS]
    + [(plain, dtype) for dtype in DTYPES if dtype != "float32"]
    + [pytest.param(layer, "bfloat16", marks=pytest.mark.long) for layer in LAYERS[1:]]
    + [pytest.param(normalised, "float16", marks=pytest.mark.long)],
)
def test_exact_rewrites_keep_every_bit_of_the_jitted_step(layer: Any, dtype: str) -> None:
    with jax.enable_x64(dtype == "float64"):
        step, params, xs = training(layer, dtype)
        want, better = one_by_one(step, params, xs), optimize(step, "exact")
        assert one_by_one(better, params, xs) == want
        if dtype != "bfloat16" or layer in (plain, strided, biased, normalised):  # none is left
            assert fused(better, params, xs) == want


def in_scan(layer: Any, xs: jax.Array) -> jax.Array:
    return lax.scan(lambda h, x: (layer(x) + h / 2, None), jnp.zeros_like(xs[0]), xs)[0]


def in_branch(layer: Any, xs: jax.Array) -> jax.Array:
    return lax.cond(xs[(0,) * xs.ndim] < 9, layer, lambda x: 2 * layer(x), xs[0])


def in_branch_of_scan(layer: Any, xs: jax.Array) -> jax.Array:
    return lax.map(lambda x: in_branch(layer, x[None]), xs)


@pytest.mark.parametrize("place", [in_scan, in_branch, in_branch_of_scan])
def test_exact_rewrites_keep_every_bit_of_loops_and_branches(place: Any) -> None:
    """As in a ConvLSTM3D: there XLA does not bring the gradients into its fast layout."""
    rng = np.random.default_rng(0)
    numbers = ("NDHWC", "DHWIO", "NDHWC")

    def loss(w: jax.Array, xs: jax.Array) -> jax.Array:
        convolve = functools.partial(lax.conv_general_dilated, dimension_numbers=numbers)
        layer = lambda x: jnp.tanh(convolve(x, w, (1, 1, 1), "SAME"))  # noqa: E731
        return jnp.mean(jnp.square(place(lambda x: layer(layer(x)), xs)))

    def step(w: jax.Array, xs: jax.Array) -> tuple[jax.Array, jax.Array]:
        value, grad = jax.value_and_grad(loss)(w, xs)
        return w - 0.125 * grad, value

    w, xs = normal(rng, (3, 3, 3, 4, 4)), normal(rng, (2, 3, 8, 6, 6, 6, 4))
    want, better = one_by_one(step, w, xs), optimize(step, "exact")
    assert one_by_one(better, w, xs) == fused(better, w, xs) == want
    rows = explain_rewrites(step, w, xs[0], rewrites="exact").rows
    assert all(row.rule == "" for row in rows if row.primitive == "conv_general_dilated")


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("layer", [grouped, depthwise])
def test_exact_rewrites_keep_every_bit_of_groups(layer: Any, dtype: str) -> None:
    with jax.enable_x64(dtype == "float64"):
        step, params, xs = training(layer, dtype)
        better = optimize(step, "exact")
        assert one_by_one(better, params, xs) == one_by_one(step, params, xs)


@pytest.mark.parametrize("layer", [grouped, depthwise])
def test_the_loop_keeps_the_gradients_of_grouped_weights(layer: Any) -> None:
    _, (w, *_), xs = training(layer, "float32")

    def step(w: Any, x: jax.Array) -> tuple[Any, jax.Array]:
        value, grad = jax.value_and_grad(lambda w: jnp.mean(jnp.square(layer(x, w))))(w)
        return w - 0.1 * grad, value

    assert fused(optimize(step, "exact"), w, xs) == one_by_one(step, w, xs)


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("layer", [plain, strided, biased, normalised])
def test_every_gradient_convolution_is_rewritten(layer: Any, dtype: str) -> None:
    step, params, xs = training(layer, dtype)
    rows = explain_rewrites(step, params, xs[0], rewrites="exact").rows
    rules = [row.rule for row in rows for _ in range(row.count)]
    assert rules.count("canonical_conv") == 3  # two of weights, one of what is between them


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_a_convolution_of_unknown_rounding_is_kept_and_explained(dtype: str) -> None:
    step, params, xs = training(recomputed, dtype)
    rows = explain_rewrites(step, params, xs[0], rewrites="exact").rows
    left = [row for row in rows if "changes last bits" in row.reason]
    assert bool(left) == (dtype == "bfloat16")
