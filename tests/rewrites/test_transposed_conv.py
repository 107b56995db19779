"""Gradients of transposed convolutions, with swapped roles: as accurate, in fewer products."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from jax import lax

from functrain.rewrites import optimize, swapped_conv
from functrain.rewrites._equations import walk_equations

from . import cases

SWAPPED = swapped_conv.swapped_conv


def layer(n: int, size: int, channels: int, taps: int, features: int, holes: int = 2) -> Any:
    """As Keras's Conv2DTranspose has it, with padding "same"."""
    low, _ = lax.padtype_to_pads([taps], [taps], [1], "SAME")[0]
    padding = [(taps - 1 - low, holes - 1 + low)] * 2
    return cases.layer(
        (n, size, size, channels),
        (taps, taps, channels, features),
        padding,
        lhs_dilation=(holes, holes),
    )


def with_cotangent(conv: Any, x: jax.Array, w: jax.Array) -> list[jax.Array]:
    shape = jax.eval_shape(conv, x, w).shape
    return [x, w, cases.normal(np.random.default_rng(1), shape)]


@cases.drawn(4)
@given(cases.convolutions(sides=(3, 3), holes=(2, 3), apart=(1, 1), strides=(1, 1), sizes=(5, 6)))
def test_a_layer_and_its_gradients_are_as_accurate_as_they_were(case: Any) -> None:
    conv, args = case
    cases.check_accuracy(cases.all_three(conv), args, SWAPPED)


@cases.drawn(4)
@given(cases.convolutions(sides=(3, 3)))
def test_any_convolution_may_swap(case: Any) -> None:
    conv, args = case
    always = SWAPPED._replace(applies=lambda eqn: True)
    cases.check_accuracy(conv, args[:2], always)


def test_the_size_decides() -> None:
    def taken(*sizes: int) -> list[bool]:
        """Whether the layer, and the gradients of its weights and of its input, are swapped."""
        conv, x, w = layer(*sizes)
        return cases.takes(SWAPPED, cases.all_three(conv), *with_cotangent(conv, x, w))

    assert taken(8, 8, 16, 4, 32) == taken(64, 32, 128, 4, 1) == [False, True, False]


def test_only_auto_takes_them() -> None:
    conv, x, w = layer(2, 4, 3, 3, 5)
    fn, args = cases.all_three(conv), with_cotangent(conv, x, w)
    holes = [
        sum(eqn.params.get("lhs_dilation", (1,))[0] > 1 for eqn, *_ in walk_equations(jaxpr))
        for jaxpr in (jax.make_jaxpr(optimize(fn, mode))(*args) for mode in ("auto", "exact"))
    ]
    assert holes == [1, 2]


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_a_scan_of_steps_does_not_depend_on_its_length(dtype: Any) -> None:
    conv, x, w = layer(2, 4, 3, 4, 3)
    cases.check_chunks(conv, x.astype(dtype), w.astype(dtype))
