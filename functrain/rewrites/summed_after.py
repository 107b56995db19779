"""Products that a scan adds up in every iteration, as one product after the loop.

The gradient of a recurrent layer has a carry for each weight, to which every iteration adds a small
product, `W += x[t]^T g[t]`, and one for each bias, `b += sum(g[t])`. No iteration reads them. So
the rewritten scan returns x and g, stacked over time, and they are multiplied once.

Milliseconds of a layer's loss and gradients, 2 cores, jax 0.10, alone under `jit` and in a loop
(`jit/loop`), on a busy machine, medians of pairs; batch B, T steps of I features, U units, float32:

          B   T   I   U      as is -> summed after
    LSTM  32  32  8   32     1.1/1.1 -> 1.0/0.87
    LSTM  32  64  128 128    29/35 -> 22/27
    LSTM  8   64  32  32     1.1/1.1 -> 0.80/0.85
    GRU   32  64  128 128    23/24 -> 17/18
    RNN   32  64  32  32     1.1/1.0 -> 0.87/1.1    (least of 25: 0.79/0.80 -> 0.74/0.66)
    LSTM  128 32  64  64     14/14 -> 14/14         (hence: few rows in a round)
    GRU   32  100 64  256    79/125 -> 91/130       (hence: what is kept stays in the cache)

In a loop on another machine (Intel Xeon, 2 cores, also busy; the minimum of 40 alternating runs),
where the smallest layer loses:

    LSTM  32  32  8   32     1.45 -> 1.53
    GRU   32  32  8   32     1.62 -> 1.57
    LSTM  8   64  32  32     1.88 -> 1.41
    LSTM  32  64  128 128    46 -> 32

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
    are_floats,
    avals,
    find_producers,
    is_sharded,
    is_sharding_free,
    nbytes,
    open_jaxpr,
    variables,
)
from functrain.rewrites._pass import rewrite_jaxpr
from functrain.rewrites._rewrite import Rewrite
from functrain.rewrites._scans import with_outputs

# The most bytes that the operands of all iterations may take: on a CPU they must stay in the cache.
MAX_BYTES = {"cpu": 2**23, "gpu": 2**26, "tpu": 2**24}
# The most rows that a product sums over in an iteration: with more, it is fast enough in the loop.
# On a GPU and a TPU every product less is a kernel less.
MAX_ROWS = {"cpu": 64, "gpu": math.inf, "tpu": math.inf}
_ROOTS = (primitives.dot_general_p, primitives.reduce_sum_p)
# Linear operations that only move elements: they can be applied to the sum instead of each term.
_RESHAPES = {primitives.transpose_p, primitives.reshape_p, primitives.squeeze_p}


class _Accumulator(NamedTuple):
    """A carry that the loop only adds to.

    Attributes:
      carry: Its index among the carries.
      root: The product, or sum, that computes each term.
      reshapes: The operations that are then applied to the term, in order.
    """

    carry: int
    root: core.JaxprEqn
    reshapes: list[core.JaxprEqn]


def _applies(eqn: core.JaxprEqn, platform: str) -> bool:
    params = eqn.params
    # On a TPU, without a loop, each sum is part of the kernel of its product.
    if platform == "tpu" and params.get("unroll") == params["length"]:
        return False
    # jax 0.12 describes the carries by a tree of a class that is not public.
    if "num_carry" not in params:
        return False
    if params["length"] <= 1 or params.get("_split_transpose") or params["jaxpr"].effects:
        return False
    return bool(_find_accumulators(params, platform))


def _find_accumulators(params: dict[str, Any], platform: str) -> list[_Accumulator]:
    """Returns the carries that are only added to.

    As many as possible: the operands of their products, stacked over time, may take MAX_BYTES.
    Returns [] if none of them sums products: sums alone gain nothing.
    """
    jaxpr, num_consts = open_jaxpr(params["jaxpr"]), params["num_consts"]
    producers = find_producers(jaxpr)
    reads = variables(jaxpr.outvars)
    for eqn in jaxpr.eqns:
        reads += variables(eqn.invars)
    consts = jaxpr.invars[:num_consts]
    accumulators: list[_Accumulator] = []
    operands: set[Any] = set()
    for carry in range(params["num_carry"]):
        old, new = jaxpr.invars[num_consts + carry], jaxpr.outvars[carry]
        add = None if isinstance(new, core.Literal) else producers.get(new)
        if add is None or add.primitive.name not in ("add", "add_any"):
            continue
        terms = [atom for atom in add.invars if atom is not old]
        # The addition must be the only reader of the carry, and the output the only reader of it.
        if len(terms) != 1 or not reads.count(old) == reads.count(new) == 1:
            continue
        accumulator = _trace_term(carry, terms[0], producers, MAX_ROWS[platform])
        # Constants of the loop are not stacked over time.
        if accumulator is None or set(accumulator.root.invars).intersection(consts):
            continue
        all_operands = operands.union(accumulator.root.invars)
        if params["length"] * sum(map(nbytes, all_operands)) <= MAX_BYTES[platform]:
            accumulators.append(accumulator)
            operands = all_operands
    has_product = any(a.root.primitive is primitives.dot_general_p for a in accumulators)
    return accumulators if has_product else []


def _trace_term(
    carry: int, term: Any, producers: dict[Any, core.JaxprEqn], max_rows: float
) -> _Accumulator | None:
    """Returns how a term is computed, or None if it is neither a product nor a sum."""
    path: list[core.JaxprEqn] = []  # from the term back to the root
    while not isinstance(term, core.Literal) and (eqn := producers.get(term)):
        if eqn.primitive not in (*_ROOTS, *_RESHAPES) or len(eqn.invars) > 2:
            break
        path.append(eqn)
        if eqn.primitive is primitives.dot_general_p:
            break
        term = eqn.invars[0]
    # The root is a product or a sum: what happens to its operands before stays in the loop.
    while path and path[-1].primitive in _RESHAPES:
        path.pop()
    if not path or not all(map(_is_movable, path)) or _summed_rows(path[-1]) > max_rows:
        return None
    *reshapes, root = path
    return _Accumulator(carry, root, reshapes[::-1])


def _summed_rows(root: core.JaxprEqn) -> int:
    """Returns the number of terms that one iteration sums for each element of the result."""
    shape = avals(root)[0].shape
    if root.primitive is primitives.reduce_sum_p:
        axes = root.params["axes"]
    else:
        (axes, _), _ = root.params["dimension_numbers"]
    return math.prod(shape[axis] for axis in axes)


def _is_movable(eqn: core.JaxprEqn) -> bool:
    """Returns True if an operation may be computed after the loop instead of inside it."""
    types: list[Any] = avals(eqn)
    return (
        are_floats(*types)
        and min(aval.dtype.itemsize for aval in types) >= 4
        and len({aval.dtype for aval in types}) == 1
        and not any(isinstance(atom, core.Literal) for atom in eqn.invars)
        and not any(map(is_sharded, types))
        and is_sharding_free(eqn.params)
    )


def _replace(rewrite: Rewrite, *inputs: jax.Array, **params: Any) -> list[jax.Array]:
    # A scan inside the body may have accumulators, too.
    params |= {"jaxpr": rewrite_jaxpr(params["jaxpr"], [rewrite])}
    accumulators = _find_accumulators(params, rewrite.platforms[0])
    jaxpr = open_jaxpr(params["jaxpr"])
    carry_start = params["num_consts"]
    xs_start = carry_start + params["num_carry"]
    consts, carry, xs = inputs[:carry_start], inputs[carry_start:xs_start], inputs[xs_start:]
    removed = {accumulator.carry for accumulator in accumulators}
    remaining = [number for number in range(len(carry)) if number not in removed]
    # The operands by variable, stacked over time. Those that are inputs of the scan are known.
    stacked = dict(zip(jaxpr.invars[xs_start:], xs, strict=True))
    # A dict instead of a set keeps the order, so that the program is the same in each process.
    operands: dict[Any, None] = {}
    for accumulator in accumulators:
        operands |= dict.fromkeys(accumulator.root.invars)
    new_outputs = [var for var in operands if var not in stacked]
    old_outputs = [var for number, var in enumerate(jaxpr.outvars) if number not in removed]
    run = core.jaxpr_as_fun(with_outputs(params["jaxpr"], [*old_outputs, *new_outputs]))

    def body(remaining_carry: list[jax.Array], x: Any) -> Any:
        # No equation reads the carries that were removed, so their initial values can be passed.
        full_carry = list(carry)
        for number, value in zip(remaining, remaining_carry, strict=True):
            full_carry[number] = value
        outs = run(*consts, *full_carry, *x)
        return outs[: len(remaining)], outs[len(remaining) :]

    options = {name: params[name] for name in ("length", "reverse", "unroll")}
    last, ys = lax.scan(body, [carry[number] for number in remaining], xs, **options)
    num_ys = len(ys) - len(new_outputs)
    stacked |= dict(zip(new_outputs, ys[num_ys:], strict=True))
    results = dict(zip(remaining, last, strict=True))
    for accumulator in accumulators:
        root_operands = [stacked[var] for var in accumulator.root.invars]
        total = _compute_total(accumulator, root_operands)
        results[accumulator.carry] = carry[accumulator.carry] + total
    return [*map(results.__getitem__, range(len(carry))), *ys[:num_ys]]


def _compute_total(accumulator: _Accumulator, stacked: list[jax.Array]) -> jax.Array:
    """Returns the sum of the terms of all iterations.

    Args:
      accumulator: The accumulator.
      stacked: The operands of its root, stacked over time: `[T, ...]`.
    """
    eqn = accumulator.root
    out: Any
    if eqn.primitive is primitives.reduce_sum_p:
        params = eqn.params | {"axes": (0, *_shift(eqn.params["axes"]))}
        out = eqn.primitive.bind(*stacked, **params)
    elif eqn.params["dimension_numbers"] == (((0,), (0,)), ((), ())):
        # `x[t]^T g[t]`: with time and batch as one axis it stays a plain matrix product.
        out = _product(*(lax.collapse(x, 0, 2) for x in stacked), **eqn.params)
    else:
        (lhs, rhs), (lhs_batch, rhs_batch) = eqn.params["dimension_numbers"]
        contracted = (0, *_shift(lhs)), (0, *_shift(rhs))
        numbers = contracted, (_shift(lhs_batch), _shift(rhs_batch))
        out = eqn.primitive.bind(*stacked, **eqn.params | {"dimension_numbers": numbers})
    for reshape in accumulator.reshapes:
        out = reshape.primitive.bind(out, **reshape.params)
    total: jax.Array = out
    return total


def _shift(axes: Any) -> tuple[int, ...]:
    """Returns the numbers of axes after time has become the first one."""
    return tuple(axis + 1 for axis in axes)


def _product(a: jax.Array, b: jax.Array, *, precision: Any, **params: Any) -> jax.Array:
    """Returns `[A, B]` of `[T, A]` and `[T, B]`, by a product with fewer rows than columns.

    Such a product is faster: see `dense_gradient`.
    """
    bind: Any = primitives.dot_general_p.bind
    if a.ndim > 2 or b.ndim > 2 or a.shape[1] <= b.shape[1]:
        product: jax.Array = bind(a, b, precision=precision, **params)
        return product
    precision = precision and precision[::-1]
    return lax.transpose(bind(b, a, precision=precision, **params), (1, 0))


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
