"""Products that a scan adds up in every iteration, as one product after the loop.

The gradient of a recurrent layer has a carry for each weight, to which every iteration adds a small
product, `W += x[t]^T g[t]`, and one for each bias, `b += sum(g[t])`. No iteration reads them. So
the rewritten scan returns x and g, stacked over time, and they are multiplied once.
On CPU with jax 0.12 a step of the benchmark's LSTM takes 1.12 times as long without this rewrite,
and a step of its GRU 0.93 times.

Milliseconds of a training step (loss, gradients, SGD) in a loop of steps, 2 cores (AMD EPYC), the
least of 9 to 42 runs in turn, as is -> summed after; batch B, T steps of I features, U units,
float32:

          B    T    I   U      jax 0.10        jax 0.12
    LSTM  32   32   8   32     0.82 -> 0.75    0.82 -> 0.78
    LSTM  8    64   32  32     0.85 -> 0.67    0.69 -> 0.55
    RNN   32   64   32  32     0.71 -> 0.55    0.76 -> 0.64
    GRU   32   64   128 128    15.8 -> 12.7    15.8 -> 12.5
    LSTM  128  32   64  64     10.7 -> 9.9     10.5 -> 9.6
    LSTM  256  16   32  64     9.2 -> 9.5      12.1 -> 11.5
    RNN   512  16   32  32     1.71 -> 1.62    1.87 -> 2.05    (hence: few rows in a round)
    GRU   32   100  64  256    -               48.2 -> 47.2    (hence: a limit for the bytes)

For a GPU every product in a loop is a kernel, and so is each sum. For a TPU a loop is faster, too,
unless it is large; without a loop (`unrolled_scan`) each sum is part of its product's kernel.
Estimates of the compilers for a training step of such a layer, without a device:

    H100, kernels     LSTM      32   32   8   32     938 -> 779
                      GRU       32   32   8   32     711 -> 616
    v5e, cycles       LSTM      32   32   8   32     641,136 -> 565,557
                      unrolled  32   32   8   32     260,513 -> 363,060
                      LSTM      64   64   32  128    1,500,648 -> 1,383,867
                      LSTM      128  64   64  256    2,378,425 -> 2,445,459     (hence: a limit)
                      16 GRUs   32   128  8   32     6,046,153 -> 7,328,565

The sums are computed in another order, which changes the last bits.
"""

import math
from typing import Any, NamedTuple

import jax
from jax import lax
from jax.extend import core
from jax.extend.core import primitives

from functrain.rewrites._equations import (
    are_wide_floats,
    avals,
    find_producer,
    nbytes,
    open_jaxpr,
    variables,
)
from functrain.rewrites._pass import rewrite_jaxpr
from functrain.rewrites._rewrite import Rewrite
from functrain.rewrites._scans import (
    is_known_loop,
    scan_part,
    split_inputs,
    trace_scan,
    with_outputs,
)

# The most bytes that the operands of all iterations may take: on a CPU they must stay in the cache.
MAX_BYTES = {"cpu": 2**23, "gpu": 2**26, "tpu": 2**24}
# The most rows that a product sums over in an iteration: with more, it is fast enough in the loop.
# On a GPU and a TPU every product less is a kernel less.
MAX_ROWS = {"cpu": 128, "gpu": math.inf, "tpu": math.inf}
_ROOTS = (primitives.dot_general_p, primitives.reduce_sum_p)
# Linear operations that only move elements: they can be applied to the sum instead of each term.
_RESHAPES = {primitives.transpose_p, primitives.reshape_p, primitives.squeeze_p}


class _Accumulator(NamedTuple):
    """A carry that the loop only adds to.

    Attributes:
      term: The variable that each iteration adds.
      root: The product, or sum, whose elements the term holds.
    """

    term: Any
    root: core.JaxprEqn


def _applies(eqn: core.JaxprEqn, platform: str) -> bool:
    params = eqn.params
    if not is_known_loop(params):
        return False
    # On a TPU, without a loop, each sum is part of the kernel of its product.
    if platform == "tpu" and params["unroll"] == params["length"]:
        return False
    return bool(_find_accumulators(eqn, platform))


def _find_accumulators(eqn: core.JaxprEqn, platform: str) -> dict[Any, _Accumulator]:
    """Returns the carries that are only added to, by their variable in the body.

    As many as possible: the operands of their products, stacked over time, may take MAX_BYTES.
    Returns {} if none of them sums products: sums alone gain nothing.
    """
    jaxpr = open_jaxpr(eqn.params["jaxpr"])
    consts, carry, _ = split_inputs(eqn.invars, eqn)
    reads = variables(jaxpr.outvars)
    for inner in jaxpr.eqns:
        reads += variables(inner.invars)
    accumulators: dict[Any, _Accumulator] = {}
    operands: set[Any] = set()
    for old, new in zip(carry, jaxpr.outvars, strict=False):
        add = find_producer(new, jaxpr)
        if add is None or add.primitive.name not in ("add", "add_any"):
            continue
        terms = [atom for atom in add.invars if atom is not old]
        # The addition must be the only reader of the carry, and the output the only reader of it.
        if len(terms) != 1 or not reads.count(old) == reads.count(new) == 1:
            continue
        root = _find_root(terms[0], jaxpr)
        if root is None or not _is_movable(root, consts):
            continue
        all_operands = operands.union(root.invars)
        num_bytes = eqn.params["length"] * sum(map(nbytes, all_operands))
        if num_bytes <= MAX_BYTES[platform] and _summed_rows(root) <= MAX_ROWS[platform]:
            accumulators[old] = _Accumulator(terms[0], root)
            operands = all_operands
    sums_product = any(
        accumulator.root.primitive is primitives.dot_general_p
        for accumulator in accumulators.values()
    )
    return accumulators if sums_product else {}


def _find_root(term: Any, jaxpr: core.Jaxpr) -> core.JaxprEqn | None:
    """Returns the product or sum that a term is computed from, or None if there is none.

    What happens to its operands before stays in the loop.
    """
    root, eqn = None, find_producer(term, jaxpr)
    while eqn is not None and eqn.primitive in (*_ROOTS, *_RESHAPES):
        root = eqn if eqn.primitive in _ROOTS else root
        is_product = eqn.primitive is primitives.dot_general_p
        eqn = None if is_product else find_producer(eqn.invars[0], jaxpr)
    return root


def _is_movable(root: core.JaxprEqn, consts: dict[Any, Any]) -> bool:
    """Returns True if a product or sum may be computed after the loop instead of inside it."""
    # What is the same in all iterations is not stacked over time.
    varies = all(isinstance(atom, core.Var) and atom not in consts for atom in root.invars)
    return varies and are_wide_floats(root)


def _summed_rows(root: core.JaxprEqn) -> int:
    """Returns the number of terms that one iteration sums for each element of the result."""
    shape, axes = avals(root)[0].shape, _summed_axes(root)[0][0]
    return math.prod(shape[axis] for axis in axes)


def _summed_axes(root: core.JaxprEqn) -> Any:
    """Returns the axes of each operand that are summed over, and those of a product's batch."""
    is_product = root.primitive is primitives.dot_general_p
    return root.params["dimension_numbers"] if is_product else ((root.params["axes"],), ())


def _replace(rewrite: Rewrite, *inputs: jax.Array, **params: Any) -> list[jax.Array]:
    # A scan inside the body may have accumulators, too.
    params |= {"jaxpr": rewrite_jaxpr(params["jaxpr"], [rewrite])}
    eqn = trace_scan(inputs, params)
    accumulators = _find_accumulators(eqn, rewrite.platforms[0])
    consts, carry, values = split_inputs(inputs, eqn)
    outvars = open_jaxpr(params["jaxpr"]).outvars
    last, outputs = dict(zip(carry, outvars, strict=False)), outvars[len(carry) :]
    kept = {var: start for var, start in carry.items() if var not in accumulators}
    # A dict instead of a set keeps the order, so that the program is the same in each process.
    operands = dict.fromkeys(
        var for accumulator in accumulators.values() for var in accumulator.root.invars
    )
    # Those that are inputs of the scan are stacked already.
    stacked = [var for var in operands if var not in values]
    part = [*map(last.__getitem__, kept), *outputs, *stacked]
    ends, ys = scan_part(params, part, consts, kept, values)
    values.update(zip(stacked, ys[len(outputs) :], strict=True))
    results = dict(zip(kept, ends, strict=True))
    terms = _sum_terms(params["jaxpr"], list(accumulators.values()), values)
    for var, term in zip(accumulators, terms, strict=True):
        results[var] = carry[var] + term
    return [*map(results.__getitem__, carry), *ys[: len(outputs)]]


def _sum_terms(
    body: Any, accumulators: list[_Accumulator], values: dict[Any, jax.Array]
) -> list[jax.Array]:
    """Returns the sums of the terms of all iterations, given the stacked operands of the roots."""
    sums = {
        accumulator.root.outvars[0]: _sum_over_time(accumulator.root, values)
        for accumulator in accumulators
    }
    # What moves the elements of a term moves those of the sum.
    moves = with_outputs(body, [accumulator.term for accumulator in accumulators], list(sums))
    terms: list[jax.Array] = core.jaxpr_as_fun(moves)(*sums.values())
    return terms


def _sum_over_time(root: core.JaxprEqn, values: dict[Any, jax.Array]) -> Any:
    """Returns the result of a product or sum, summed over all iterations."""
    operands = [values[var] for var in root.invars]
    axes, batch = _summed_axes(root)
    if root.primitive is primitives.reduce_sum_p:
        changed: dict[str, Any] = {"axes": (0, *_shift(axes[0]))}
    elif axes == ((0,), (0,)) and batch == ((), ()):
        # `x[t]^T g[t]`: time and batch as one axis. With two axes XLA transposes an operand.
        operands, changed = [lax.collapse(x, 0, 2) for x in operands], {}
    else:
        contracted = tuple((0, *_shift(each)) for each in axes)
        changed = {"dimension_numbers": (contracted, tuple(map(_shift, batch)))}
    return root.primitive.bind(*operands, **root.params | changed)


def _shift(axes: Any) -> tuple[int, ...]:
    """Returns the numbers of axes after time has become the first one."""
    return tuple(axis + 1 for axis in axes)


def _make_rewrite(name: str, platform: str) -> Rewrite:
    rewrite = Rewrite(
        name=name,
        primitive=primitives.scan_p,
        applies=lambda eqn: _applies(eqn, platform),
        replace=lambda *inputs, **params: _replace(rewrite, *inputs, **params),
        reason="one product after the loop beats one in every iteration",
        platforms=(platform,),
    )
    return rewrite


summed_after = _make_rewrite("summed_after", "cpu")
summed_after_gpu = _make_rewrite("summed_after_gpu", "gpu")
summed_after_tpu = _make_rewrite("summed_after_tpu", "tpu")
