"""Where the first number that is not finite came from."""

import dataclasses
import itertools
import sys
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend import core, source_info_util
from jax.extend.core import primitives

from functrain.common import _tree
from functrain.common._types import PyTree
from functrain.data._batch import require_batch
from functrain.engine._guards import guarded
from functrain.step._check import check_step
from functrain.step._metered import MeteredStep


class Outside(NamedTuple):
    """Indices of a gather that are outside of the axis it takes from: it gives NaN for them.

    Attributes:
      size: Length of the axis, such as the number of classes.
      indices: The different indices that are outside; from negative ones `size` is added before.
      leaf: The integers of the batch that they come from, such as labels, with their range; empty
        where that is not known.
    """

    size: int
    indices: tuple[int, ...]
    leaf: str = ""

    def __str__(self) -> str:
        shown = ", ".join(map(str, self.indices[:5])) + ", ..." * (len(self.indices) > 5)
        source = f" They come from {self.leaf}." if self.leaf else ""
        return f"Indices are outside of [0, {self.size}), which gives NaN: {shown}.{source}"


@dataclasses.dataclass(frozen=True)
class NotFinite:
    """An operation whose inputs were in order, and whose output was not.

    Attributes:
      operation: Its name in JAX, such as ``log``; ``input`` for what came in with NaN or infinity.
      found: What its output has, such as ``NaN in 3 of 8``.
      where: The layer, if it has a name, and the source line; behind it that of a library which it
        calls. Of an input its path.
      inputs: The type of each input, and its range.
      within: What it was found in, from outside in, such as ``scan, round 7``.
      reaches: Whether what the step returns is not finite because of it.
      cause: Where an infinity among its inputs came from.
      outside: Of a gather, the indices that are outside of what it takes from, such as labels
        above the number of classes.

    Examples:
      >>> print(NotFinite("log", "-inf in 1 of 2", "net.py:3", ("float32[2]: 0 to 1",)))
      log: -inf in 1 of 2
        at net.py:3
        of float32[2]: 0 to 1
    """

    operation: str
    found: str
    where: str
    inputs: tuple[str, ...] = ()
    within: tuple[str, ...] = ()
    reaches: bool = True
    cause: "NotFinite | None" = None
    outside: Outside | None = None

    def __str__(self) -> str:
        lines = [f"{self.operation}: {self.found}"]
        lines += [f"  at {self.where}"] * bool(self.where)
        lines += [f"  within {step}" for step in self.within]
        lines += [f"  of {text}" for text in self.inputs]
        if self.outside is not None:
            lines.append(f"  {self.outside}")
        if not self.reaches:
            lines.append("  Nothing of it reaches what the step returns.")
        if self.cause is not None:
            lines += ["The infinity came from", str(self.cause)]
        return "\n".join(lines)


def explain_nan(step: Any, state: PyTree, batch: PyTree) -> NotFinite | None:
    """Takes a step operation by operation, and finds the first that made NaN or an infinity.

    The step is run uncompiled, so that it takes its time; what is fused in a compiled program may
    round otherwise. A mask of infinities that does no harm is passed by: it is the operation that
    is looked for whose output has NaN while its inputs have none, and from which that of the result
    comes; and where an infinity made it, the operation that made the infinity.

    Args:
      step: ``(state, batch) -> (state, logs)``, with metrics or without; not jitted.
      state: The state before the step, bare. Not changed.
      batch: The batch.

    Returns:
      The operation; None if all is finite.

    Raises:
      TypeError: `step` is no step.

    Examples:
      >>> import jax.numpy as jnp
      >>> def step(w, x):
      ...     return w - jnp.log(x - 1.0).sum(), {}
      >>> found = explain_nan(step, jnp.zeros(()), jnp.array([2.0, 1.0]))
      >>> print(found.operation, "|", found.found, "|", found.inputs[0])
      log | -inf in 1 of 2 | float32[2]: 0 to 1
    """
    check_step(step)
    require_batch(batch)
    if isinstance(step, MeteredStep):
        state = step.start(state)
    named = [
        *((f"state/{path}", x) for path, x in _tree.leaves_with_path(state)),
        *((f"batch/{path}", x) for path, x in _tree.leaves_with_path(batch)),
    ]
    for path, x in named:
        if kind := _kind(x):
            return NotFinite("input", _share(x, kind), path)
    with guarded(step):
        closed: Any = jax.make_jaxpr(step)(state, batch)
    found = _search(closed, [x for _, x in named], ())
    if found is None or found.outside is None:
        return found
    leaf = _source(found.outside, [(path, x) for path, x in named if path.startswith("batch/")])
    return dataclasses.replace(found, outside=found.outside._replace(leaf=leaf))


def _search(closed: Any, inputs: Sequence[Any], within: tuple[str, ...]) -> NotFinite | None:
    """Finds the operation inside a jaxpr that made the first of what its outputs suffer from."""
    jaxpr = closed.jaxpr
    values = dict(zip((*jaxpr.constvars, *jaxpr.invars), (*closed.consts, *inputs), strict=True))

    def read(atom: Any) -> Any:
        return atom.val if isinstance(atom, core.Literal) else values[atom]

    def of(atom: Any) -> str:
        return _kind(read(atom))

    made = [var for eqn in jaxpr.eqns for var in eqn.outvars]
    values.update(zip(made, _evaluated(closed, made, inputs), strict=True))

    def first(atoms: Sequence[Any], kinds: tuple[str, ...]) -> core.JaxprEqn | None:
        """Goes back from some values to the first operation that made what they suffer from."""
        found, suffer = None, {a for a in atoms if isinstance(a, core.Var) and of(a) in kinds}
        for eqn in reversed(jaxpr.eqns):
            if not suffer.isdisjoint(eqn.outvars):
                before = [a for a in eqn.invars if of(a) in kinds]
                suffer |= {a for a in before if isinstance(a, core.Var)}
                found = found if before else eqn
        return found

    def described(eqn: core.JaxprEqn, reaches: bool = True) -> NotFinite:
        own = [read(atom) for atom in eqn.invars]
        look = _INSIDE.get(eqn.primitive)
        if look is not None and (inside := look(eqn, own, within)) is not None:
            # What jax keeps traced, such as take_along_axis, has no lines of its own.
            return dataclasses.replace(inside, reaches=reaches, where=inside.where or _place(eqn))
        bad = next(x for x in map(values.__getitem__, eqn.outvars) if _kind(x))
        origin = first(eqn.invars, ("inf",))
        return NotFinite(
            eqn.primitive.name,
            _share(bad, _kind(bad)),
            _place(eqn),
            tuple(map(_range, own)),
            within,
            reaches,
            None if origin is None else described(origin),
            _outside(eqn, own) if eqn.primitive is primitives.gather_p else None,
        )

    for kinds in (("nan",), ("nan", "inf")):
        if (eqn := first(jaxpr.outvars, kinds)) is not None:
            return described(eqn)
    if within:  # an infinity, or NaN, that came in
        return None
    eqn = first(made, ("nan",))
    return None if eqn is None else described(eqn, reaches=False)


def _evaluated(closed: Any, wanted: list[Any], inputs: Sequence[Any]) -> list[Any]:
    """Returns what all equations of a jaxpr come to, one after the other."""
    # For the names that jax wants of as many inputs and outputs.
    like: Any = jax.make_jaxpr(lambda *_: [0.0] * len(wanted))(*inputs)
    every = closed.jaxpr.replace(outvars=wanted, debug_info=like.jaxpr.debug_info)
    return list(core.jaxpr_as_fun(closed.replace(jaxpr=every))(*inputs))


def _outside(eqn: core.JaxprEqn, inputs: Sequence[Any]) -> Outside | None:
    """Returns the indices of a gather that are outside of the first axis where some are."""
    operand, indices = inputs[0], np.asarray(inputs[1])
    axes, sizes = eqn.params["dimension_numbers"].start_index_map, eqn.params["slice_sizes"]
    for column, axis in enumerate(axes):
        starts, last = indices[..., column], operand.shape[axis] - sizes[axis]
        outside = np.unique(starts[(starts < 0) | (starts > last)])
        if outside.size:
            return Outside(operand.shape[axis], tuple(outside.tolist()))
    return None


def _source(outside: Outside, leaves: Sequence[tuple[str, Any]]) -> str:
    """Returns the leaf of integers among whose values are all that are outside, with its range."""
    for path, x in leaves:
        if _tree.is_array(x) and jnp.issubdtype(x.dtype, jnp.integer):
            values = np.unique(np.asarray(x)).astype(np.int64)
            indices = np.where(values < 0, values + outside.size, values)
            if set(outside.indices) <= set(indices.tolist()):
                return f"{path}, {_range(x)}"
    return ""


def _in_call(eqn: core.JaxprEqn, inputs: list[Any], within: tuple[str, ...]) -> NotFinite | None:
    body = eqn.params.get("jaxpr", eqn.params.get("call_jaxpr"))
    if body is None:
        return None
    closed = body if hasattr(body, "consts") else core.ClosedJaxpr(body, [])
    return _search(closed, inputs, within)


def _in_cond(eqn: core.JaxprEqn, inputs: list[Any], within: tuple[str, ...]) -> NotFinite | None:
    number = int(inputs[0])
    branch = eqn.params["branches"][number]
    return _search(branch, inputs[1:], (*within, f"cond, branch {number}"))


def _in_scan(eqn: core.JaxprEqn, inputs: list[Any], within: tuple[str, ...]) -> NotFinite | None:
    length, body = eqn.params["length"], eqn.params["jaxpr"]
    # Their numbers have other names in each version of jax; a stacked array has one axis more.
    stacked = _stacked(eqn.invars, body.jaxpr.invars)
    carried = len(eqn.outvars) - _stacked(eqn.outvars, body.jaxpr.outvars)
    known = len(inputs) - stacked - carried
    consts, carry = inputs[:known], inputs[known : known + carried]
    run = core.jaxpr_as_fun(body)
    rounds = range(length - 1, -1, -1) if eqn.params["reverse"] else range(length)
    for i in rounds:
        now = [*consts, *carry, *(x[i] for x in inputs[known + carried :])]
        out = run(*now)
        if any(map(_kind, out)) and (found := _search(body, now, (*within, f"scan, round {i}"))):
            return found
        carry = out[:carried]
    return None


def _stacked(outer: Sequence[Any], inner: Sequence[Any]) -> int:
    pairs = zip(outer, inner, strict=True)
    return sum(len(a.aval.shape) != len(b.aval.shape) for a, b in pairs)


def _in_while(eqn: core.JaxprEqn, inputs: list[Any], within: tuple[str, ...]) -> NotFinite | None:
    params = eqn.params
    of_test, of_body = params["cond_nconsts"], params["body_nconsts"]
    tested, consts = inputs[:of_test], inputs[of_test : of_test + of_body]
    carry, body = inputs[of_test + of_body :], params["body_jaxpr"]
    test, run = core.jaxpr_as_fun(params["cond_jaxpr"]), core.jaxpr_as_fun(body)
    for i in itertools.count():
        if not test(*tested, *carry)[0]:
            break
        now = [*consts, *carry]
        carry = run(*now)
        if any(map(_kind, carry)) and (found := _search(body, now, (*within, f"while, round {i}"))):
            return found
    return None


# What looks into what an operation calls; None for what shows nothing.
_INSIDE: dict[Any, Callable[[core.JaxprEqn, list[Any], tuple[str, ...]], NotFinite | None]] = {
    primitives.jit_p: _in_call,
    primitives.call_p: _in_call,
    primitives.closed_call_p: _in_call,
    primitives.remat_p: _in_call,
    primitives.custom_jvp_call_p: _in_call,
    primitives.custom_vjp_call_p: _in_call,
    primitives.cond_p: _in_cond,
    primitives.scan_p: _in_scan,
    primitives.while_p: _in_while,
}


def _kind(x: Any) -> str:
    """Returns "nan", or "inf", or "" for what is finite, or no number."""
    if not hasattr(x, "dtype") or not jnp.issubdtype(x.dtype, jnp.inexact):
        return ""
    array = _wide(x)
    if np.isnan(array).any():
        return "nan"
    return "inf" if np.isinf(array).any() else ""


def _wide(x: Any) -> np.ndarray[Any, Any]:
    of_complex = jnp.issubdtype(x.dtype, jnp.complexfloating)
    return np.asarray(x, np.complex128 if of_complex else np.float64)


def _share(x: Any, kind: str) -> str:
    array = _wide(x)
    bad = np.isnan(array) if kind == "nan" else np.isinf(array)
    name = "NaN" if kind == "nan" else ("-inf" if (array[bad].real < 0).all() else "inf")
    return f"{name} in {bad.sum():,} of {array.size:,}"


def _range(x: Any) -> str:
    spec = _tree.spec(x)
    if not hasattr(x, "dtype") or not jnp.issubdtype(x.dtype, jnp.number) or not x.size:
        return spec
    if jnp.issubdtype(x.dtype, jnp.complexfloating):
        spec, x = f"|{spec}|", jnp.abs(x)
    array = _wide(x).ravel()
    low, high = (f"{of(array):.6g}" for of in (np.fmin.reduce, np.fmax.reduce))
    return f"{spec}: {low}" + (f" to {high}" if high != low else "")


def _place(eqn: core.JaxprEqn) -> str:
    """Names the layer, the line that a user wrote, and that of the library which it calls."""
    frames = source_info_util.summarize(eqn.source_info, num_frames=_DEPTH).splitlines()[::-1]
    frames = list(itertools.takewhile(lambda frame: not frame.startswith(__file__), frames))
    folders = [getattr(sys.modules.get(name), "__path__", ()) for name in _LIBRARIES]
    libraries = tuple(f"{folder}/" for folder in itertools.chain(*folders))
    own = next((frame for frame in frames if not frame.startswith(libraries)), None)
    shown = [frame.rpartition("/")[2] for frame in dict.fromkeys([own or "", *frames[:1]])]
    return "  ".join(
        filter(None, [str(eqn.source_info.name_stack), ", in ".join(filter(None, shown))])
    )


_DEPTH = 200  # of calls; those of a step within a deep model are some tens
_LIBRARIES = ("bridge", "flax", "functrain", "keras", "optax")
