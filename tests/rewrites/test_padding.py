"""Convolutions with any padding are right in every mode, with their gradients: against NumPy.

XLA's CPU backend in jaxlib before 0.12 reads outside of the image if a padding is negative in front
and positive behind, which it may be in a gradient or after XLA has merged two paddings.
"""

import itertools
import warnings
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax import lax

import functrain as ft
from functrain.rewrites import _compile, optimize, swapped_conv
from functrain.rewrites._equations import walk_equations

from . import cases

pytestmark = pytest.mark.filterwarnings("ignore::functrain.inspect.MiscompilationWarning")
MODES = ("off", "exact", "auto")
# Padding in front of and behind an image of 8 x 8, kernel, stride: XLA reads outside of the image.
CROPPED = [((-1, 1), 2, 3), ((-1, 2), 2, 3), ((-5, 1), 1, 1), ((-8, 3), 1, 1), ((-3, 3), 3, 1)]


def numpy_all_three(conv: Any, *arrays: jax.Array) -> list[np.ndarray[Any, Any]]:
    """A convolution and both gradients in float64, as a sum over the taps of a padded image."""
    params = jax.make_jaxpr(conv)(*arrays[:2]).eqns[0].params
    dn, count = params["dimension_numbers"], params["feature_group_count"]
    layouts = [(spec[0], *spec[2:], spec[1]) for spec in (dn.lhs_spec, dn.rhs_spec, dn.out_spec)]
    x, w, g = (
        np.asarray(a, np.float64).transpose(layout)
        for a, layout in zip(arrays, layouts, strict=True)
    )
    n, *sizes, _ = x.shape
    features, *window, inputs = w.shape
    axes = list(
        zip(
            sizes,
            window,
            g.shape[1:-1],
            params["padding"],
            params["window_strides"],
            params["lhs_dilation"],
            params["rhs_dilation"],
            strict=True,
        )
    )
    x, g = x.reshape(n, *sizes, count, inputs), g.reshape(*g.shape[:-1], count, -1)
    w = w.reshape(count, -1, *window, inputs)
    out, dx, dw = np.zeros_like(g), np.zeros_like(x), np.zeros_like(w)
    # For each tap, the positions of the window that see a pixel with it, and these pixels.
    for tap in itertools.product(*map(range, window)):
        pairs = []
        for t, (size, _, positions, (low, _), stride, hole, apart) in zip(tap, axes, strict=True):
            places = [(p, p * stride + t * apart - low) for p in range(positions)]
            inside = [(p, i // hole) for p, i in places if i % hole == 0 and 0 <= i // hole < size]
            pairs.append(np.array(inside, int).reshape(-1, 2).T)
        every = np.arange(n)
        at = np.ix_(every, *(positions for positions, _ in pairs))
        seen = np.ix_(every, *(pixels for _, pixels in pairs))
        kernel = w[(slice(None), slice(None), *tap)]
        out[at] += np.einsum("...gi,goi->...go", x[seen], kernel)
        dx[seen] += np.einsum("...go,goi->...gi", g[at], kernel)
        rows = x[seen].reshape(-1, count, inputs), g[at].reshape(-1, *g.shape[-2:])
        dw[(slice(None), slice(None), *tap)] = np.einsum("rgi,rgo->goi", *rows)
    results = out.reshape(*out.shape[:-2], -1), dx.reshape(n, *sizes, -1)
    results = *results, dw.reshape(features, *window, inputs)
    layouts = layouts[2], layouts[0], layouts[1]
    return [r.transpose(np.argsort(layout)) for r, layout in zip(results, layouts, strict=True)]


def check(conv: Any, args: Any, got: Any) -> None:
    for have, want in zip(got, numpy_all_three(conv, *args), strict=True):
        eps = float(jnp.finfo(have.dtype).eps)
        # The longest sums have some thousand terms.
        tolerance = 30 * eps * (1 + np.abs(want).max())
        np.testing.assert_allclose(np.asarray(have, np.float64), want, rtol=0, atol=tolerance)


@pytest.mark.parametrize("mode", MODES)
@cases.drawn(6)
@given(st.data())
def test_any_padding_is_right(mode: Any, data: st.DataObject) -> None:
    groups = data.draw(st.sampled_from([(1, 1), (2, 3)]))
    conv, args = data.draw(
        cases.convolutions(
            sides=(16, 16),
            groups=groups,
            holes=(1, 3),
            strides=(1, 4),
            sizes=(4, 9),
            windows=(1, 4),
            pads=(-5, 5),
        )
    )
    check(conv, args, _compile.jit(optimize(cases.all_three(conv), mode))(*args))


def cropped_layer(case: Any, size: int = 8) -> tuple[Any, list[jax.Array]]:
    pad, taps, stride = case
    conv, x, w = cases.layer(
        (4, size, size, 16), (taps, taps, 16, 16), [pad, pad], window_strides=(stride, stride)
    )
    shape = jax.eval_shape(conv, x, w).shape
    return conv, [x, w, cases.normal(np.random.default_rng(1), shape)]


def in_scan(fn: Any, *args: jax.Array) -> Any:
    outs = lax.scan(lambda carry, _: (carry, fn(*args)), 0, length=2)[1]
    return [out[1] for out in outs]


def in_while(fn: Any, *args: jax.Array) -> Any:
    zeros = [jnp.zeros(a.shape, a.dtype) for a in jax.eval_shape(fn, *args)]
    rounds = jnp.argmin(args[0]) * 0 + 2  # unknown to the compiler
    return lax.fori_loop(0, rounds, lambda i, outs: list(fn(*args)), zeros)


def in_cond(fn: Any, *args: jax.Array) -> Any:
    zeros = [jnp.zeros(a.shape, a.dtype) for a in jax.eval_shape(fn, *args)]
    return lax.cond(args[0][(0,) * 4] < 100, lambda: list(fn(*args)), lambda: zeros)


def in_custom_vjp(fn: Any, *args: jax.Array) -> Any:
    inner = jax.custom_vjp(lambda *args: fn(*args))
    inner.defvjp(lambda *args: (fn(*args), args), lambda args, g: args)
    return inner(*args)


PLACES = {
    "jit": lambda fn, *args: jax.jit(fn)(*args),
    "scan": in_scan,
    "while": in_while,
    "cond": in_cond,
    "custom_vjp": in_custom_vjp,
    "remat": lambda fn, *args: jax.checkpoint(fn)(*args),
}


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("case", CROPPED, ids=str)
def test_a_padding_that_crops_is_right_in_a_step(case: Any, mode: Any) -> None:
    conv, args = cropped_layer(case)
    fused = ft.fuse(lambda s, b: (s, cases.all_three(conv)(*b)), 2, donate=False, rewrites=mode)
    _, logs = fused(jnp.zeros(()), [jnp.stack([a, a]) for a in args])
    check(conv, args, [log[1] for log in logs])


@pytest.mark.parametrize("place", PLACES)
def test_a_padding_that_crops_is_right_wherever_it_is(place: str) -> None:
    conv, args = cropped_layer(CROPPED[0])
    program = _compile.jit(lambda *args: PLACES[place](cases.all_three(conv), *args))
    check(conv, args, program(*args))


@pytest.mark.parametrize(("image", "conv"), [((0, 1), (-1, 0)), ((0, 2), (-1, -1))], ids=str)
def test_paddings_that_xla_merges_are_right(image: Any, conv: Any) -> None:
    convolve, (x, w, _) = cropped_layer((conv, 2, 3))

    def padded(x: jax.Array, w: jax.Array) -> jax.Array:
        return convolve(jnp.pad(x, [(0, 0), image, image, (0, 0)]), w)

    merged, args = cropped_layer(((image[0] + conv[0], image[1] + conv[1]), 2, 3))
    got = _compile.jit(padded)(x, w)
    np.testing.assert_allclose(got, numpy_all_three(merged, *args)[0], rtol=0, atol=1e-4)


def test_the_swap_makes_no_padding_that_crops_in_front() -> None:
    conv, args = cropped_layer(((4, 4), 2, 3))
    rule = swapped_conv.swapped_conv._replace(applies=lambda eqn: True)
    for eqn, *_ in walk_equations(cases.rewritten(cases.all_three(conv), args, rule)):
        for low, _ in eqn.params.get("padding", ()):
            assert low >= 0


@pytest.mark.skipif(not _compile.IS_AFFECTED, reason="this jaxlib is right")
def test_the_user_is_told_and_other_programs_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_compile, "_has_warned", False)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for case in (((2, 2), 2, 3), ((1, -1), 2, 3)):
            conv, (x, w, _) = cropped_layer(case)
            _compile.jit(conv)(x, w)
    conv, (x, w, _) = cropped_layer(CROPPED[0])
    with pytest.warns(ft.inspect.MiscompilationWarning, match="a convolution with negative padd"):
        _compile.jit(conv)(x, w)
