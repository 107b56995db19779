"""Short scans of small bodies, unrolled.

On a TPU every kernel costs some 1,800 cycles, on a GPU 2 to 5 µs, and the body of a recurrent cell
is a few of them. In a loop, what the gradient needs of each iteration must be written to stacked
arrays, and read from them again, by kernels of their own. Without a loop, it stays where it is, and
XLA fuses the iterations with each other and with what is around them.

A training step of a recurrent layer and a dense layer with Adam, in a loop of 32 steps; batch B, T
steps of I features, U units, float32. Estimates of the compilers, jax 0.10, without a device:
cycles of a step for TPU v5e, kernels of a step for H100 (in brackets the seconds that the program
takes to compile, on a busy CPU of 2 cores):

                      B    T    I   U      as is -> unrolled
    v5e   LSTM        32   32   8   32     641,136 (1.4) -> 260,513 (3.2)
          GRU         32   32   8   32     752,070 (1.3) -> 318,300 (4.3)
          two LSTMs   32   32   8   32     1,279,363 (1.6) -> 496,981 (6.2)    (bidirectional)
          LSTM        64   64   32  128    1,500,648 (2.8) -> 577,827 (13)
          LSTM        128  64   64  256    2,378,425 (4.4) -> 1,085,739 (23)
          LSTM        32   128  8   32     2,457,840 (1.1) -> 964,029 (22)     (hence: a limit)
    H100  LSTM        32   32   8   32     779 (3.6) -> 195 (17), in eights 255 (9)
          GRU         32   32   8   32     616 (4.5) -> 246 (18)
          two LSTMs   32   32   8   32     1541 (8.7) -> 407 (20)
          LSTM        32   128  8   32     2,999 -> in eights 892 (10), in 32s 664 (54)

The figures for H100 are with the weights' gradients summed after the loop (`summed_after`). For a
TPU a scan that is unrolled in part costs more than the loop: LSTM, T = 32, in twos 1,243,529, in
fours 853,982, in eights 625,477 cycles. XLA copies each iteration's values into the stacked arrays
by kernels of their own.

The operations of an iteration stay the same. Only what XLA fuses may differ, and with it the last
bits.
"""

from typing import Any

import jax
from jax.extend import core
from jax.extend.core import primitives

from functrain.rewrites._equations import walk_equations
from functrain.rewrites._pass import rewrite_jaxpr
from functrain.rewrites._rewrite import Rewrite
from functrain.rewrites._scans import is_known_loop, is_small

# The most equations that the bodies of all iterations may have, so that compilers take seconds.
MAX_EQUATIONS = {"tpu": 2048, "gpu": 1024}
# How many iterations one of a longer scan runs, for a GPU.
PART = 8
# The most bytes that the values of all iterations may take, even if XLA frees none of them.
MAX_BYTES = 2**29
# About as many operations generate random numbers.
_RANDOM_EQUATIONS = 100


def _find_factor(params: dict[str, Any], platform: str) -> int:
    """Returns how many iterations an iteration of the rewritten scan runs; 1 for no change."""
    # Another `unroll` is the user's choice.
    if not is_known_loop(params) or params.get("unroll") != 1 or not is_small(params, MAX_BYTES):
        return 1
    length: int = params["length"]
    num_equations = _count_equations(params["jaxpr"])
    if num_equations * length <= MAX_EQUATIONS[platform]:
        return length
    is_part_fast = platform == "gpu" and num_equations * PART <= MAX_EQUATIONS[platform]
    return PART if is_part_fast and length > PART else 1


def _count_equations(body: Any) -> int:
    """Returns the number of equations of a body when the scans inside it are unrolled, too."""
    return sum(
        executions * (_RANDOM_EQUATIONS if eqn.primitive.name.startswith("random_") else 1)
        for eqn, _, executions in walk_equations(body)
    )


def _make_rewrite(name: str, platform: str) -> Rewrite:
    def applies(eqn: core.JaxprEqn) -> bool:
        return _find_factor(eqn.params, platform) > 1

    def replace(*inputs: jax.Array, **params: Any) -> list[jax.Array]:
        # A scan inside the body may be short, too.
        body = rewrite_jaxpr(params["jaxpr"], [rewrite])
        params |= {"unroll": _find_factor(params, platform), "jaxpr": body}
        outs: list[jax.Array] = primitives.scan_p.bind(*inputs, **params)
        return outs

    rewrite = Rewrite(
        name=name,
        primitive=primitives.scan_p,
        applies=applies,
        replace=replace,
        reason="iterations outside of a loop need fewer kernels",
        platforms=(platform,),
    )
    return rewrite


unrolled_scan = _make_rewrite("unrolled_scan", "tpu")
unrolled_scan_gpu = _make_rewrite("unrolled_scan_gpu", "gpu")
