"""What the tests of the convolution rewrites share: random convolutions, and a judge in float64."""

import os
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from hypothesis import assume, settings
from hypothesis import strategies as st
from jax import lax

from functrain.rewrites import optimize
from functrain.rewrites._compile import MiscompilationWarning, jit
from functrain.rewrites._equations import walk_equations
from functrain.rewrites._pass import rewrite_jaxpr
from functrain.rewrites._rewrite import Rewrite

Conv = Callable[[jax.Array, jax.Array], jax.Array]


def drawn(examples: int) -> settings:
    """How many examples are drawn, the same ones each time; `make test-all` draws more."""
    times = int(os.environ.get("TIMES_AS_MANY_EXAMPLES", "1"))
    return settings(max_examples=times * examples, deadline=None, derandomize=True)


def normal(rng: np.random.Generator, shape: Any, dtype: Any = jnp.float32) -> jax.Array:
    return jnp.asarray(rng.normal(size=shape), dtype)


def layer(
    image: Sequence[int], kernel: Sequence[int], padding: Any = "SAME", **options: Any
) -> tuple[Conv, jax.Array, jax.Array]:
    """A convolution `[N, *S, C]` x `[*W, I, O]`, an image and a kernel for it."""
    rank = len(image) - 2
    spatial = "DHW"[3 - rank :]
    options = {"window_strides": (1,) * rank, **options}
    options["dimension_numbers"] = (f"N{spatial}C", f"{spatial}IO", f"N{spatial}C")

    def conv(x: jax.Array, w: jax.Array) -> jax.Array:
        return lax.conv_general_dilated(x, w, padding=padding, **options)

    rng = np.random.default_rng(0)
    return conv, normal(rng, image), normal(rng, kernel)


def all_three(conv: Conv) -> Callable[..., tuple[jax.Array, ...]]:
    """The result and both gradients."""

    def fn(x: jax.Array, w: jax.Array, g: jax.Array) -> tuple[jax.Array, ...]:
        out, pull = jax.vjp(conv, x, w)
        return out, *pull(g)

    return fn


def exact(fn: Callable[..., Any], *args: jax.Array) -> Any:
    """The same in float64, by XLA's own operations."""
    with jax.enable_x64(True):
        wide = (jnp.asarray(np.asarray(a, np.float64)) for a in args)
        return jax.tree.map(np.asarray, jax.jit(fn)(*wide))


def kinds(jaxpr: Any) -> list[str]:
    return [eqn.primitive.name for eqn in jaxpr.eqns]


def rewritten(fn: Callable[..., Any], args: Sequence[jax.Array], *rules: Rewrite) -> Any:
    return rewrite_jaxpr(jax.make_jaxpr(fn)(*args), rules)


def takes(rule: Rewrite, fn: Callable[..., Any], *args: jax.Array) -> list[bool]:
    """Whether the rule takes each of the convolutions of a function."""
    all_ = [eqn for eqn, *_ in walk_equations(jax.make_jaxpr(fn)(*args))]
    return [rule.applies(eqn) for eqn in all_ if eqn.primitive is rule.primitive]


@st.composite
def convolutions(
    draw: st.DrawFn,
    sides: tuple[int, int] = (1, 1),
    groups: tuple[int, int] = (1, 1),
    ranks: Sequence[int] = (1, 2, 2, 3),
    holes: tuple[int, int] = (1, 2),
    apart: tuple[int, int] = (1, 2),
    strides: tuple[int, int] = (1, 3),
    sizes: tuple[int, int] = (7, 8),
    windows: tuple[int, int] = (1, 3),
    pads: tuple[int, int] = (-2, 4),
) -> tuple[Conv, list[jax.Array]]:
    """A convolution and its operands with a cotangent. A group has `sides` inputs and outputs."""
    rank = draw(st.sampled_from(ranks))
    each = lambda values: st.tuples(*[values] * rank)  # noqa: E731
    within = lambda bounds: each(st.integers(*bounds))  # noqa: E731
    axes = st.permutations(range(rank + 2)).map(tuple)
    dn = lax.ConvDimensionNumbers(draw(axes), draw(axes), draw(axes))
    window, size = draw(within(windows)), draw(within(sizes))
    n, count = draw(st.integers(1, 4)), draw(st.integers(*groups))
    options = {
        "window_strides": draw(within(strides)),
        "padding": draw(each(st.tuples(st.integers(*pads), st.integers(*pads)))),
        "lhs_dilation": draw(within(holes)),
        "rhs_dilation": draw(within(apart)),
        "dimension_numbers": dn,
        "feature_group_count": count,
    }
    inputs, outputs = (draw(st.integers(1, side) if side > 0 else st.just(-side)) for side in sides)
    lhs, rhs = [0] * (rank + 2), [0] * (rank + 2)
    for axis, value in zip(dn.lhs_spec, (n, count * inputs, *size), strict=True):
        lhs[axis] = value
    for axis, value in zip(dn.rhs_spec, (count * outputs, inputs, *window), strict=True):
        rhs[axis] = value
    dtype = draw(st.sampled_from((jnp.float32, jnp.bfloat16, jnp.float16)))
    rng = np.random.default_rng(draw(st.integers(0, 9)))

    def conv(x: jax.Array, w: jax.Array) -> jax.Array:
        return lax.conv_general_dilated(x, w, **options)

    x, w = normal(rng, lhs, dtype), normal(rng, rhs, dtype)
    try:
        shape = jax.eval_shape(conv, x, w).shape
    except ValueError:  # the padding crops more than there is
        assume(False)
    assume(all(shape))
    return conv, [x, w, normal(rng, shape, dtype)]


def check_accuracy(fn: Callable[..., Any], args: Sequence[jax.Array], *rules: Rewrite) -> None:
    """At least one rule applies, and no result is further from the truth than without it."""
    before = jax.make_jaxpr(fn)(*args)
    after = rewrite_jaxpr(before, rules)
    assert after is not before
    run = jit(lambda *args: jax.extend.core.jaxpr_as_fun(after)(*args))
    with warnings.catch_warnings():
        # A drawn padding may be one that this jaxlib computes wrongly outside of functrain.
        warnings.simplefilter("ignore", MiscompilationWarning)
        want, was, got = exact(fn, *args), jax.tree.leaves(jit(fn)(*args)), run(*args)
    for x, y, z in zip(jax.tree.leaves(want), was, got, strict=True):
        assert (z.shape, z.dtype, z.weak_type) == (y.shape, y.dtype, y.weak_type)
        error, error_was = (np.abs(np.asarray(v, np.float64) - x).max() for v in (z, y))
        assert error <= 2 * error_was + 4 * float(jnp.finfo(z.dtype).eps) * (1 + np.abs(x).max())


def check_chunks(conv: Conv, x: jax.Array, w: jax.Array) -> None:
    """Four steps of gradient descent are twice two steps, to the bit."""

    def step(w: jax.Array, x: jax.Array) -> tuple[jax.Array, jax.Array]:
        value, grad = jax.value_and_grad(lambda w: jnp.mean(jnp.square(conv(x, w))))(w)
        return w - jnp.asarray(0.01, w.dtype) * grad, value

    better = optimize(step)
    scan = jax.jit(lambda w, xs: lax.scan(better, w, xs))
    xs = jnp.stack([x, x + 1, x * 2, x - 1])
    # Twos, not ones: XLA dissolves a loop of one, and since jax 0.12 the mean in the loss then
    # differs in its last bit, with or without a convolution.
    half, losses = scan(w, xs[:2])
    twos, more_losses = scan(half, xs[2:])
    together, all_losses = scan(w, xs)
    np.testing.assert_array_equal(together, twos)
    np.testing.assert_array_equal(all_losses, jnp.concatenate([losses, more_losses]))
