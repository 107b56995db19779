"""Ungrouped convolutions: another layout, the same bits."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from hypothesis import given
from jax import lax

from functrain.rewrites import optimize
from functrain.rewrites._conv import canonical_numbers
from functrain.rewrites._pass import rewrite_jaxpr
from functrain.rewrites.canonical_conv import canonical_conv

from . import cases
from .cases import normal


def same(got: Any, want: Any) -> None:
    for g, w in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        assert (g.dtype, g.weak_type) == (w.dtype, w.weak_type)
        np.testing.assert_array_equal(np.asarray(g), np.asarray(w))


def numbers(jaxpr: Any) -> list[lax.ConvDimensionNumbers]:
    return [
        eqn.params["dimension_numbers"]
        for eqn in jaxpr.eqns
        if eqn.primitive.name == "conv_general_dilated"
    ]


DRAWN = cases.convolutions(
    sides=(4, 4), ranks=(0, 1, 2, 3), strides=(1, 2), sizes=(5, 8), pads=(-1, 2)
)


@cases.drawn(12)
@given(DRAWN)
def test_no_bit_changes_under_jit(case: Any) -> None:
    conv, (x, w, _) = case
    same(jax.jit(optimize(conv, "exact"))(x, w), jax.jit(conv)(x, w))


@cases.drawn(12)
@given(DRAWN)
def test_all_become_canonical(case: Any) -> None:
    conv, (x, w, _) = case
    after = rewrite_jaxpr(jax.make_jaxpr(conv)(x, w), [canonical_conv])
    assert numbers(after) == [canonical_numbers(x.ndim)]
    assert rewrite_jaxpr(after, [canonical_conv]) is after


def test_a_canonical_or_grouped_one_is_left_alone() -> None:
    for layer in (
        cases.layer((1, 4, 4, 4), (3, 3, 4, 8)),
        cases.layer((1, 4, 4, 4), (3, 3, 2, 8), feature_group_count=2),
    ):
        assert cases.takes(canonical_conv, *layer) == [False]


def test_precision_result_type_nan_and_inf_are_kept() -> None:
    def conv(x: jax.Array, w: jax.Array) -> jax.Array:
        return lax.conv(
            x, w, (1, 1), "SAME", precision="highest", preferred_element_type=jnp.float32
        )

    rng = np.random.default_rng(0)
    x, w = normal(rng, (2, 3, 6, 6), jnp.bfloat16), normal(rng, (4, 3, 3, 3), jnp.bfloat16)
    x = x.at[0, 1, 4, 4].set(jnp.nan).at[1, 0, 2, 5].set(jnp.inf)
    params = rewrite_jaxpr(jax.make_jaxpr(conv)(x, w), [canonical_conv]).eqns[2].params
    assert params["precision"] == (lax.Precision.HIGHEST, lax.Precision.HIGHEST)
    same(jax.jit(optimize(conv, "exact"))(x, w), jax.jit(conv)(x, w))
