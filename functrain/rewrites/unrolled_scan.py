"""Short scans of small bodies, unrolled, for TPUs.

On a TPU every kernel costs some 1,800 cycles, and the body of a recurrent cell is a few of them. In
a loop, what the gradient needs of each iteration must be written to stacked arrays, and read from
them again, by kernels of their own. Without a loop, it stays where it is, and XLA fuses the
iterations with each other and with what is around them.

A training step of a recurrent layer and a dense layer with Adam, in a loop of 32 steps; batch B, T
steps of I features, U units, float32. Estimates of the compiler for TPU v5e, jax 0.10, without a
device: cycles of a step, and in brackets the seconds that the program takes to compile on a busy
CPU of 2 cores:

                B    T    I   U      as is -> unrolled
    LSTM        32   32   8   32     641,136 (1.4) -> 260,513 (3.2)
    GRU         32   32   8   32     752,070 (1.3) -> 318,300 (4.3)
    two LSTMs   32   32   8   32     1,279,363 (1.6) -> 496,981 (6.2)    (bidirectional)
    LSTM        64   64   32  128    1,500,648 (2.8) -> 577,827 (13)
    LSTM        128  64   64  256    2,378,425 (4.4) -> 1,085,739 (23)
    LSTM        32   128  8   32     2,457,840 (1.1) -> 964,029 (22)     (hence: a limit)

A scan that is unrolled in part costs more than the loop: LSTM, T = 32, in twos 1,243,529, in fours
853,982, in eights 625,477 cycles. XLA copies each iteration's values into the stacked arrays by
kernels of their own.

The operations of an iteration stay the same. Only what XLA fuses may differ, and with it the last
bits.
"""

from typing import Any

import jax
from jax.extend.core import JaxprEqn, primitives

from functrain.rewrites._equations import avals, has_known_sizes, nbytes, walk_equations
from functrain.rewrites._pass import rewrite_jaxpr
from functrain.rewrites._rewrite import rewrite

# The most equations that the bodies of all iterations may have, so that compilers take seconds.
MAX_EQUATIONS = 2048
# The most bytes that the values of all iterations may take, even if XLA frees none of them.
MAX_BYTES = 2**29
# The most bytes of a single value. What is larger takes longer than a kernel to start.
MAX_VALUE_BYTES = 2**21
# About as many operations generate random numbers.
_RANDOM_EQUATIONS = 100


def _applies(eqn: JaxprEqn) -> bool:
    length, body = eqn.params["length"], eqn.params["jaxpr"]
    # The length may be a symbol, as in a shape-polymorphic export. Another `unroll` is the user's
    # choice.
    if not isinstance(length, int) or length < 2 or body.effects or eqn.params["unroll"] != 1:
        return False
    num_equations, num_bytes = 0, 0
    # Scans inside the body are unrolled, too.
    for inner, _, executions in walk_equations(body):
        # Inside of a scan whose length is a symbol, the number of executions is one as well.
        if not isinstance(executions, int) or not all(map(has_known_sizes, avals(inner))):
            return False
        if max(map(nbytes, (*inner.invars, *inner.outvars)), default=0) > MAX_VALUE_BYTES:
            return False
        is_random = inner.primitive.name.startswith("random_")
        num_equations += executions * (_RANDOM_EQUATIONS if is_random else 1)
        num_bytes += executions * sum(map(nbytes, inner.outvars))
    return length * num_equations <= MAX_EQUATIONS and length * num_bytes <= MAX_BYTES


@rewrite(
    primitives.scan_p, _applies, "iterations without a loop need fewer kernels", platforms=("tpu",)
)
def unrolled_scan(*inputs: jax.Array, **params: Any) -> list[jax.Array]:
    """Unrolls a scan, and the short scans inside it."""
    # A scan inside the body may be short, too.
    body = rewrite_jaxpr(params["jaxpr"], [unrolled_scan])
    params |= {"unroll": params["length"], "jaxpr": body}
    outs: list[jax.Array] = primitives.scan_p.bind(*inputs, **params)
    return outs
