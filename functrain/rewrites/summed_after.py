"""Products that a scan adds up round by round, as one product after the loop.

The gradient of a recurrent layer has a carry for each weight, to which every round adds a small
product, `W += x[t]^T g[t]`, and for each bias `b += sum(g[t])`; no round reads them. So x and g
are kept, stacked over time, and multiplied once.

Milliseconds of a layer's loss and gradients, 2 cores, jax 0.10, alone under `jit` and in a loop
(`jit/loop`), on a busy machine, medians of pairs; batch B, T steps of I features, U units, float32:

          B   T   I   U      as is -> summed after
    LSTM  32  32  8   32     1.1/1.1 -> 1.0/0.87
    LSTM  32  64  128 128    29/35 -> 22/27
    LSTM  8   64  32  32     1.1/1.1 -> 0.80/0.85
    GRU   32  64  128 128    23/24 -> 17/18
    RNN   32  64  32  32     1.1/1.0 -> 0.87/1.1    (least of 25: 0.79/0.80 -> 0.74/0.66)
    LSTM  128 32  64  64     14/14 -> 14/14         (so: few rows in a round)
    GRU   32  100 64  256    79/125 -> 91/130       (so: what is kept stays in the cache)

In a loop on another machine (Intel Xeon, 2 cores, also busy; the least of 40, in turns), where the
smallest loses:

    LSTM  32  32  8   32     1.45 -> 1.53
    GRU   32  32  8   32     1.62 -> 1.57
    LSTM  8   64  32  32     1.88 -> 1.41
    LSTM  32  64  128 128    46 -> 32

Sums are taken in another order: last bits change.
"""

import math
from typing import Any, NamedTuple

import jax
from jax import lax
from jax.extend import core
from jax.extend.core import primitives

from functrain.rewrites._conv import are_floats, avals, is_sharded, is_sharding_free
from functrain.rewrites._frame import Rewrite, rewrite_jaxpr

# Bytes that a scan may keep for it.
MAX_BYTES = 2**23
# Rows that a product sums over in a round: with more it is fast enough.
MAX_ROWS = 64
_ROOTS = (primitives.dot_general_p, primitives.reduce_sum_p)
# What may follow the product: it is the same of each term and of their sum.
_FOLLOWS = {primitives.transpose_p, primitives.reshape_p, primitives.squeeze_p}


class _Sum(NamedTuple):
    """A carry that is only added to.

    Attributes:
      carry: Which.
      root: The product, or sum, that each term comes from.
      after: What is then done to it, in order.
    """

    carry: int
    root: core.JaxprEqn
    after: list[core.JaxprEqn]


def _applies(eqn: core.JaxprEqn) -> bool:
    params = eqn.params
    if "num_carry" not in params:  # jax 0.12 has them in a tree of its own, which is not public
        return False
    simple = params["length"] > 1 and not params.get("_split_transpose")
    return simple and not params["jaxpr"].effects and bool(_sums(params))


def _sums(params: dict[str, Any]) -> list[_Sum]:
    """Returns the carries that are only added to, as far as what makes them up may be kept."""
    jaxpr, consts = _open(params["jaxpr"]), params["num_consts"]
    made = {out: eqn for eqn in jaxpr.eqns for out in eqn.outvars}
    read = [atom for eqn in jaxpr.eqns for atom in _variables(eqn.invars)]
    read += _variables(jaxpr.outvars)
    found: list[_Sum] = []
    kept: set[Any] = set()
    for number in range(params["num_carry"]):
        old, new = jaxpr.invars[consts + number], jaxpr.outvars[number]
        add = None if isinstance(new, core.Literal) else made.get(new)
        if add is None or add.primitive.name not in ("add", "add_any"):
            continue
        terms = [atom for atom in add.invars if atom is not old]
        if len(terms) != 1 or not read.count(old) == read.count(new) == 1:
            continue
        one = _traced_back(number, terms[0], made)
        if one is None or set(one.root.invars).intersection(jaxpr.invars[:consts]):
            continue
        with_it = kept.union(one.root.invars)
        if params["length"] * sum(map(_nbytes, with_it)) <= MAX_BYTES:
            found, kept = [*found, one], with_it
    pays = any(one.root.primitive is primitives.dot_general_p for one in found)
    return found if pays else []


def _traced_back(carry: int, term: Any, made: dict[Any, core.JaxprEqn]) -> _Sum | None:
    """Returns what a term comes from, None if it is no product and no sum."""
    path: list[core.JaxprEqn] = []  # the last first
    while not isinstance(term, core.Literal) and (eqn := made.get(term)):
        if eqn.primitive not in (*_ROOTS, *_FOLLOWS) or len(eqn.invars) > 2:
            break
        path.append(eqn)
        if eqn.primitive is primitives.dot_general_p:
            break
        term = eqn.invars[0]
    while path and path[-1].primitive in _FOLLOWS:  # what is before the first sum
        path.pop()
    if not path or not all(map(_is_simple, path)) or _rows(path[-1]) > MAX_ROWS:
        return None
    return _Sum(carry, path[-1], path[-2::-1])


def _rows(root: core.JaxprEqn) -> int:
    """Returns how many numbers a round adds up to one."""
    shape = avals(root)[0].shape
    if root.primitive is primitives.reduce_sum_p:
        return math.prod(shape[axis] for axis in root.params["axes"])
    (axes, _), _ = root.params["dimension_numbers"]
    return math.prod(shape[axis] for axis in axes)


def _is_simple(eqn: core.JaxprEqn) -> bool:
    types: list[Any] = avals(eqn)
    return (
        are_floats(*types)
        and min(aval.dtype.itemsize for aval in types) >= 4
        and len({aval.dtype for aval in types}) == 1
        and not any(isinstance(atom, core.Literal) for atom in eqn.invars)
        and not any(map(is_sharded, types))
        and is_sharding_free(eqn.params)
    )


def _replace(*inputs: jax.Array, **params: Any) -> list[jax.Array]:
    params |= {"jaxpr": rewrite_jaxpr(params["jaxpr"], [summed_after])}  # scans inside it
    sums, jaxpr = _sums(params), _open(params["jaxpr"])
    first, after = params["num_consts"], params["num_consts"] + params["num_carry"]
    consts, carry, xs = inputs[:first], inputs[first:after], inputs[after:]
    gone = {one.carry for one in sums}
    kept = [number for number in range(len(carry)) if number not in gone]
    known = dict(zip(jaxpr.invars[after:], xs, strict=True))
    terms = [v for v in dict.fromkeys(v for one in sums for v in one.root.invars) if v not in known]
    outs = [v for number, v in enumerate(jaxpr.outvars) if number not in gone]
    run = core.jaxpr_as_fun(_returning(params["jaxpr"], [*outs, *terms]))

    def body(some: list[jax.Array], x: Any) -> Any:
        full = list(carry)  # those that are gone are not read
        for number, value in zip(kept, some, strict=True):
            full[number] = value
        new = run(*consts, *full, *x)
        return new[: len(kept)], new[len(kept) :]

    how = {name: params[name] for name in ("length", "reverse", "unroll")}
    some, rows = lax.scan(body, [carry[number] for number in kept], xs, **how)
    ends = dict(zip(kept, some, strict=True))
    known |= dict(zip(terms, rows[len(rows) - len(terms) :], strict=True))
    for one in sums:
        ends[one.carry] = carry[one.carry] + _total(one, [known[v] for v in one.root.invars])
    return [*(ends[i] for i in range(len(carry))), *rows[: len(rows) - len(terms)]]


def _total(one: _Sum, stacked: list[jax.Array]) -> jax.Array:
    """Returns the sum of all terms, of the operands of all rounds."""
    eqn = one.root
    out: Any
    if eqn.primitive is primitives.reduce_sum_p:
        axes = (0, *(axis + 1 for axis in eqn.params["axes"]))
        out = eqn.primitive.bind(*stacked, **eqn.params | {"axes": axes})
    elif eqn.params["dimension_numbers"] == (((0,), (0,)), ((), ())):
        out = _product(*(lax.collapse(x, 0, 2) for x in stacked), **eqn.params)
    else:
        contracted, batch = (
            tuple(tuple(axis + 1 for axis in axes) for axes in pair)
            for pair in eqn.params["dimension_numbers"]
        )
        lhs, rhs = contracted
        numbers = ((0, *lhs), (0, *rhs)), batch
        out = eqn.primitive.bind(*stacked, **eqn.params | {"dimension_numbers": numbers})
    for later in one.after:
        out = later.primitive.bind(out, **later.params)
    total: jax.Array = out
    return total


def _product(a: jax.Array, b: jax.Array, *, precision: Any, **params: Any) -> jax.Array:
    """Returns `[A, B]` of `[T, A]` and `[T, B]`; a wide product is faster than a high one."""
    bind: Any = primitives.dot_general_p.bind
    if a.ndim > 2 or b.ndim > 2 or a.shape[1] <= b.shape[1]:
        wide: jax.Array = bind(a, b, precision=precision, **params)
        return wide
    precision = precision and precision[::-1]
    return lax.transpose(bind(b, a, precision=precision, **params), (1, 0))


def _returning(closed: Any, outvars: list[Any]) -> Any:
    """Returns the jaxpr with other outputs, without what they do not need."""
    jaxpr, needed, eqns = _open(closed), set(_variables(outvars)), []
    for eqn in reversed(jaxpr.eqns):
        if needed.intersection(eqn.outvars):
            needed |= set(_variables(eqn.invars))
            eqns.append(eqn)
    debug = jaxpr.debug_info._replace(result_paths=None)
    new = jaxpr.replace(outvars=outvars, eqns=eqns[::-1], debug_info=debug)
    return new if closed is jaxpr else closed.replace(jaxpr=new)


def _open(jaxpr: Any) -> Any:
    return jaxpr if isinstance(jaxpr, core.Jaxpr) else jaxpr.jaxpr


def _variables(atoms: Any) -> list[Any]:
    return [atom for atom in atoms if not isinstance(atom, core.Literal)]


def _nbytes(atom: Any) -> int:
    size: int = math.prod(atom.aval.shape) * atom.aval.dtype.itemsize
    return size


summed_after = Rewrite(
    name="summed_after",
    primitive=primitives.scan_p,
    applies=_applies,
    replace=_replace,
    reason="one product after the loop beats one in every round",
)
