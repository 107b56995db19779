"""Parts of a scan's body on which no carry depends, computed for all iterations at once.

The forward pass of a recurrent layer stacks a dozen arrays for its gradient: gates, activations and
their derivatives. On a TPU each iteration writes them by several kernels of 1,800 cycles or more.
The rewritten scan stacks only its carries. From them, the values of all iterations are computed
after the loop, as one batch; the products that the loop needs are computed once more for it, which
costs little as long as they are small. Likewise, products of inputs with weights, `x[t] @ W`, are
computed for all iterations before the loop.

A training step of a recurrent layer and a dense layer with Adam, in a loop of 32 steps; batch B, T
steps of I features, U units, float32. Estimates of the compiler for TPU v5e, jax 0.10, without a
device: cycles of a step (seconds to compile), as it is, with `summed_after`, and with this rewrite,
too:

           B    T    I   U      as is -> summed after -> batched
    LSTM   32   32   8   32     641,136 (1.8) -> 565,557 (0.9) -> 390,959 (1.3)
    GRU    32   32   8   32     752,070 (0.7) -> 625,772 (0.7) -> 353,869 (1.6)
    LSTM   64   64   32  128    1,500,648 (1.9) -> 1,383,867 (3.8) -> 915,622 (7.1)
    LSTM   128  64   64  256    2,378,425 (3.8) -> the same -> 2,079,750 (6.5)
    LSTM   32   128  8   32     2,457,840 (1.1) -> 2,160,857 (1.6) -> 1,422,446 (5.7)
    GRU    32   128  8   32     2,846,579 (2.1) -> 2,343,070 (2.5) -> 1,292,872 (7.5)
    RNN    32   128  8   32     1,171,056 (0.9) -> 634,297 (2.2) -> 601,958 (2.9)

Populations of such layers, B = 32, T = 128, I = 8, U = 32, as is -> with both rewrites:

    8 LSTMs     3,863,392 -> 3,044,657
    8 GRUs      4,383,271 -> 4,041,327
    16 LSTMs    5,928,610 -> 6,350,488    (hence: a limit for the bytes)
    16 GRUs     6,046,153 -> 6,259,500

Shorter scans are unrolled instead: see `unrolled_scan`. Without the layout that the inputs get, the
GRU with T = 32 takes 1,042,610 cycles: XLA lets the batch be the slowest axis, and gathers what an
iteration needs by kernels of their own.

Sums of products may be computed in another order, which changes the last bits.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.layout import Layout, with_layout_constraint
from jax.extend import core
from jax.extend.core import primitives

from functrain.rewrites._equations import is_sharded, open_jaxpr, variables
from functrain.rewrites._rewrite import Rewrite
from functrain.rewrites._scans import (
    is_known_loop,
    is_small,
    scan_part,
    split_inputs,
    trace_scan,
    with_outputs,
)

# The most bytes that the values of all iterations may take: see the populations.
MAX_BYTES = 3 * 2**26
# The operations that may be applied to all iterations at once. Random numbers are not among them:
# for some kinds of keys, a batch gets other numbers. Nor are loops and branches, which get slower.
_BATCHED_NAMES = """
abs add add_any and atan2 broadcast_in_dim ceil clamp concatenate convert_element_type copy cos
custom_jvp_call div dot_general eq erf exp exp2 expm1 floor ge gt integer_pow is_finite
jit le log log1p logistic lt max min mul ne neg not one_minus_square or pow reduce_and reduce_max
reduce_min reduce_or reduce_sum reshape rsqrt select_n sign sin slice split sqrt square squeeze
stop_gradient sub tan tanh transpose xor
"""
_BATCHED = frozenset(_BATCHED_NAMES.split())


class _Plan(NamedTuple):
    """How a scan is divided.

    Attributes:
      products: Products of inputs and constants of the loop, computed before it.
      carried: Carries whose values at the begin of each iteration are needed after the loop.
      stacked: The variables that the loop stacks.
      later: Outputs of the body that are computed after the loop.
    """

    products: list[Any]
    carried: list[Any]
    stacked: list[Any]
    later: list[Any]


def _applies(eqn: core.JaxprEqn) -> bool:
    params = eqn.params
    # Without a loop, nothing is stacked.
    if not is_known_loop(params) or params["unroll"] == params["length"]:
        return False
    if any(is_sharded(var.aval) for var in eqn.invars) or not is_small(params, MAX_BYTES):
        return False
    return _plan(eqn) is not None


def _plan(eqn: core.JaxprEqn) -> _Plan | None:
    """Returns how to divide a scan, or None if that gains nothing or is not possible."""
    jaxpr = open_jaxpr(eqn.params["jaxpr"])
    consts, carry, xs = map(list, split_inputs(eqn.invars, eqn))
    last = jaxpr.outvars[: len(carry)]
    outputs = list(dict.fromkeys(variables(jaxpr.outvars[len(carry) :])))
    products = _find_products(jaxpr, consts, xs, last)
    unplanned = _Plan(products, [], [var for var in outputs if var not in xs], [])
    later = [var for var in outputs if var not in {*jaxpr.invars, *variables(last)}]
    sources = _find_sources(jaxpr, later, products)
    if sources is None:
        return unplanned if products else None
    carried = [var for var in carry if var in sources or var in outputs]
    # The value of a carry before an iteration is that after the iteration before.
    stacked = [last[carry.index(var)] for var in carried]
    stacked += [var for var in outputs if var in variables(last) and var not in xs]
    if len(variables(stacked)) < len(stacked):
        return unplanned if products else None
    stacked = list(dict.fromkeys(stacked))
    if len(stacked) < len(unplanned.stacked):
        return _Plan(products, carried, stacked, later)
    return unplanned if products else None


def _find_products(
    jaxpr: core.Jaxpr, consts: list[Any], xs: list[Any], last: list[Any]
) -> list[Any]:
    """Returns the products of inputs that the carries depend on, but that depend on no carry."""
    in_loop = {out for eqn in with_outputs(jaxpr, last).eqns for out in eqn.outvars}
    constant, independent, products = set(consts), {*consts, *xs}, []
    for eqn in jaxpr.eqns:
        reads = variables(eqn.invars)
        if constant.issuperset(reads):
            constant |= set(eqn.outvars)
            independent |= set(eqn.outvars)
        elif _is_batched(eqn) and independent.issuperset(reads):
            independent |= set(eqn.outvars)
            if eqn.primitive is primitives.dot_general_p and eqn.outvars[0] in in_loop:
                products.append(eqn.outvars[0])
    return products


def _find_sources(jaxpr: core.Jaxpr, outputs: list[Any], products: list[Any]) -> set[Any] | None:
    """Returns the inputs of a body, and products, that outputs are computed from.

    None if an operation between them cannot be applied to all iterations at once.
    """
    part = with_outputs(jaxpr, outputs, [*jaxpr.invars, *products])
    if not all(map(_is_batched, part.eqns)):
        return None
    reads = {var for eqn in part.eqns for var in variables(eqn.invars)}
    return reads.intersection(part.invars)


def _is_batched(eqn: core.JaxprEqn) -> bool:
    inner = [eqn for jaxpr in core.jaxprs_in_params(eqn.params) for eqn in open_jaxpr(jaxpr).eqns]
    types = [var.aval for var in (*eqn.invars, *eqn.outvars)]
    return (
        eqn.primitive.name in _BATCHED
        and not any(map(is_sharded, types))
        and all(map(_is_batched, inner))
    )


def _replace(*inputs: jax.Array, **params: Any) -> list[jax.Array]:
    eqn = trace_scan(inputs, params)
    plan = _plan(eqn)
    assert plan is not None  # `_applies` has checked it
    jaxpr = open_jaxpr(params["jaxpr"])
    # The values of variables: constants, initial values of carries, and those of all iterations.
    consts, carry, values = split_inputs(inputs, eqn)

    def compute(outvars: list[Any]) -> None:
        """Adds variables that are computed from those whose values are known."""
        part = with_outputs(params["jaxpr"], outvars, [*consts, *values])
        axes = [None] * len(consts) + [0] * len(values)
        run = jax.vmap(core.jaxpr_as_fun(part), in_axes=axes, axis_size=params["length"])
        values.update(zip(outvars, run(*consts.values(), *values.values()), strict=True))

    compute(plan.products)
    last = dict(zip(carry, jaxpr.outvars, strict=False))
    xs = {var: _with_time_first(x) for var, x in values.items()}
    end, ys = scan_part(params, [*last.values(), *plan.stacked], consts, carry, xs)
    values.update(zip(plan.stacked, ys, strict=True))
    for var in plan.carried:
        values[var] = _shift(values[last[var]], carry[var], params["reverse"])
    compute([var for var in plan.later if var not in values])
    outputs = jaxpr.outvars[len(carry) :]
    return [*end, *(_stack(atom, consts, values, params["length"]) for atom in outputs)]


def _with_time_first(x: jax.Array) -> jax.Array:
    """Returns the array in a layout in which the elements of an iteration are neighbours."""
    constrained: jax.Array = with_layout_constraint(x, Layout(tuple(range(x.ndim))))
    return constrained


def _shift(stacked: jax.Array, start: jax.Array, reverse: bool) -> jax.Array:
    """Returns the values of a carry before each iteration, given those after it."""
    first = lax.expand_dims(start, (0,))
    parts = [stacked[1:], first] if reverse else [first, stacked[:-1]]
    return lax.concatenate(parts, 0)


def _stack(
    atom: Any, consts: dict[Any, jax.Array], values: dict[Any, jax.Array], length: int
) -> jax.Array:
    """Returns the values of an output of the body in all iterations."""
    if isinstance(atom, core.Literal):
        aval: Any = atom.aval
        return jnp.full((length, *aval.shape), atom.val, aval.dtype)
    return lax.broadcast(consts[atom], (length,)) if atom in consts else values[atom]


batched_over_time = Rewrite(
    name="batched_over_time",
    primitive=primitives.scan_p,
    applies=_applies,
    replace=_replace,
    reason="values of all iterations at once need fewer kernels than stacking them",
    platforms=("tpu",),
)
