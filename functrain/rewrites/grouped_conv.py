"""Grouped convolutions as a loop over the groups, with ungrouped ones in the canonical layout.

XLA's CPU backend takes seconds for the gradient of the weights.
`benchmarks/upstream/grouped_conv.py` reproduces it. Milliseconds, 2 cores, jax 0.10, alone under
`jit` and as the body of a scan (`jit/scan`); image `[N, H, H, C]`, 3 x 3 kernel, as many features
as channels, G groups:

    N H C G          forward as is -> loop    of the input            of the weights
    8 16 64 4        1.2/0.8 -> 0.6/0.4       1.1/8.4 -> 0.6/0.4      55/25 -> 0.7/0.4
    8 8 256 8        1.5/1.1 -> 0.9/0.5       2.0/22 -> 0.9/0.5       105/55 -> 1.4/0.6
    8 28 256 32      44/37 -> 6.9/5.6         44/20 -> 11/9.5         4560/201 -> 11/11
    8 8 512 64       3.3/2.4 -> 2.1/1.6       3.3/5.2 -> 1.5/0.9      1600/54 -> 2.1/1.5

The second row was measured with an unrolled loop, which is as fast. Alternatives that were
measured: a batched matrix product for each tap was up to 5 times slower for the larger images, and
a block-diagonal kernel was slower from 8 groups on. The sums may be computed in another order,
which changes the last bits.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend.core import JaxprEqn

from functrain.rewrites._conv import canonical_rewrite, conv, conv_groups, split_axis


def _applies(eqn: JaxprEqn) -> bool:
    # If one side is 1, the convolution is depthwise: depthwise_conv computes it, or XLA does.
    groups = conv_groups(eqn)
    return groups is not None and min(groups.sides) > 1


@canonical_rewrite(_applies, "a loop over the groups beats XLA's kernel")
def grouped_conv(lhs: jax.Array, rhs: jax.Array, **params: Any) -> jax.Array:
    """Convolves one group after the other."""
    count = max(params["feature_group_count"], params["batch_group_count"])
    grouped_axis = lhs.ndim - 1 if params["feature_group_count"] > 1 else 0
    # [G, N, *S, I], [G, *W, I, O] -> [G, N, *S', O]. Unrolled, each group would take 10 ms more to
    # compile, and the program would run no faster.
    xs = _move_groups_first(lhs, grouped_axis, count), _move_groups_first(rhs, rhs.ndim - 1, count)
    out = lax.map(lambda group: conv(*group, **params), xs)
    out = lax.transpose(out, (*range(1, out.ndim - 1), 0, out.ndim - 1))
    return lax.collapse(out, out.ndim - 2)


def _move_groups_first(x: jax.Array, axis: int, count: int) -> jax.Array:
    """Splits an axis into groups, and moves the axis of the groups to the front."""
    return jnp.moveaxis(split_axis(x, axis, count), axis, 0)
