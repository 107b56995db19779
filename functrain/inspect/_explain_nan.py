"""Finds the operation that made the first number that is not finite."""

import dataclasses
import itertools
import sys
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend import core, source_info_util
from jax.extend.core import primitives

from functrain.common import _tree
from functrain.common._types import PyTree, traits_of
from functrain.data._batch import require_batch
from functrain.engine._guards import tracing_guards
from functrain.step._check import check_step


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
    """An operation that made NaN or an infinity of finite inputs.

    Attributes:
      operation: Its name in JAX, such as ``log``; ``input`` for what came in with NaN or infinity.
      found: The bad values of its output, such as ``NaN in 3 of 8``.
      where: The layer, if it has a name, and the source line; behind it that of a library which it
        calls. Of an input its path.
      inputs: The type of each input, and its range.
      within: The loops and branches around it, the outermost first, such as ``scan, round 7``.
      reaches: True if an output of the step is not finite because of it.
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


def explain_nan(state: PyTree, step: Any, batch: PyTree) -> NotFinite | None:
    """Finds the operation of a step that made the first NaN or infinity.

    The step runs uncompiled, operation by operation, so it is slow, and a compiled program may
    round differently. A mask of infinities that does no harm is ignored: the operation is one whose
    output has NaN while its inputs have none, and from which the NaN of the result comes. If an
    infinity caused it, the operation that made the infinity is its `cause`.

    Args:
      state: The state before the step, bare. Not changed.
      step: ``(state, batch) -> (state, logs)``, with metrics or without; not jitted.
      batch: The batch.

    Returns:
      The operation; None if all is finite.

    Raises:
      TypeError: `step` is no step.

    Examples:
      >>> import jax.numpy as jnp
      >>> def step(w, x):
      ...     return w - jnp.log(x - 1.0).sum(), {}
      >>> found = explain_nan(jnp.zeros(()), step, jnp.array([2.0, 1.0]))
      >>> print(found.operation, "|", found.found, "|", found.inputs[0])
      log | -inf in 1 of 2 | float32[2]: 0 to 1
    """
    check_step(step)
    require_batch(batch)
    state = traits_of(step).wrap_state(state)
    # An OrderedDict, since jax sorts the keys of a dict.
    named = list(_tree.leaves_with_path(OrderedDict(state=state, batch=batch)))
    for path, x in named:
        if kind := _kind(x):
            return NotFinite("input", _share(x, kind), path)
    with tracing_guards(step):
        closed: Any = jax.make_jaxpr(step)(state, batch)
    found = _search(closed, [x for _, x in named], ())
    if found is None or found.outside is None:
        return found
    leaf = _source(found.outside, [(path, x) for path, x in named if path.startswith("batch")])
    return dataclasses.replace(found, outside=found.outside._replace(leaf=leaf))


def _search(closed: Any, inputs: Sequence[Any], within: tuple[str, ...]) -> NotFinite | None:
    """Returns the operation of a jaxpr that made the first NaN or infinity in its outputs."""
    jaxpr = closed.jaxpr
    made = [var for eqn in jaxpr.eqns for var in eqn.outvars]
    values = dict(zip((*jaxpr.constvars, *jaxpr.invars), (*closed.consts, *inputs), strict=True))
    values.update(zip(made, _evaluated(closed, made, inputs), strict=True))

    def read(atom: Any) -> Any:
        return atom.val if isinstance(atom, core.Literal) else values[atom]

    def first(atoms: Sequence[Any], kinds: tuple[str, ...]) -> core.JaxprEqn | None:
        """Goes back from bad values to the first operation that made one from good inputs."""
        origin = None
        bad = {a for a in atoms if isinstance(a, core.Var) and _kind(values[a]) in kinds}
        for eqn in reversed(jaxpr.eqns):
            if not bad.isdisjoint(eqn.outvars):
                bad_inputs = [a for a in eqn.invars if _kind(read(a)) in kinds]
                bad.update(a for a in bad_inputs if isinstance(a, core.Var))
                origin = origin if bad_inputs else eqn
        return origin

    def described(eqn: core.JaxprEqn, reaches: bool = True) -> NotFinite:
        args = [read(atom) for atom in eqn.invars]
        search_inside = _INSIDE.get(eqn.primitive)
        if search_inside is not None and (inside := search_inside(eqn, args, within)):
            # Code that jax keeps traced, such as take_along_axis, has no lines of its own.
            return dataclasses.replace(inside, reaches=reaches, where=inside.where or _place(eqn))
        bad = next(x for x in map(values.__getitem__, eqn.outvars) if _kind(x))
        origin = first(eqn.invars, ("inf",))
        return NotFinite(
            eqn.primitive.name,
            _share(bad, _kind(bad)),
            _place(eqn),
            tuple(map(_range, args)),
            within,
            reaches,
            None if origin is None else described(origin),
            _outside(eqn, args) if eqn.primitive is primitives.gather_p else None,
        )

    for kinds in (("nan",), ("nan", "inf")):
        if (eqn := first(jaxpr.outvars, kinds)) is not None:
            return described(eqn)
    if within:  # an infinity, or NaN, that came in
        return None
    eqn = first(made, ("nan",))
    return None if eqn is None else described(eqn, reaches=False)


def _evaluated(closed: Any, wanted: list[Any], inputs: Sequence[Any]) -> list[Any]:
    """Returns the values of variables of a jaxpr, evaluated equation by equation."""
    # jax wants debug_info with a name for each input and output: take it of such a function.
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
    # The parameters with their numbers have other names in each version of jax. A stacked array has
    # one axis more outside than inside.
    stacked = _stacked(eqn.invars, body.jaxpr.invars)
    carried = len(eqn.outvars) - _stacked(eqn.outvars, body.jaxpr.outvars)
    constant = len(inputs) - stacked - carried
    consts, carry = inputs[:constant], inputs[constant : constant + carried]
    rounds = range(length - 1, -1, -1) if eqn.params["reverse"] else range(length)
    for i in rounds:
        args = [*consts, *carry, *(x[i] for x in inputs[constant + carried :])]
        outputs, found = _round(body, args, (*within, f"scan, round {i}"))
        if found:
            return found
        carry = outputs[:carried]
    return None


def _stacked(outer: Sequence[Any], inner: Sequence[Any]) -> int:
    pairs = zip(outer, inner, strict=True)
    return sum(len(a.aval.shape) != len(b.aval.shape) for a, b in pairs)


def _in_while(eqn: core.JaxprEqn, inputs: list[Any], within: tuple[str, ...]) -> NotFinite | None:
    test, body = core.jaxpr_as_fun(eqn.params["cond_jaxpr"]), eqn.params["body_jaxpr"]
    of_test = eqn.params["cond_nconsts"]
    of_both = of_test + eqn.params["body_nconsts"]
    carry = inputs[of_both:]
    for i in itertools.count():
        if not test(*inputs[:of_test], *carry)[0]:
            return None
        args = [*inputs[of_test:of_both], *carry]
        carry, found = _round(body, args, (*within, f"while, round {i}"))
        if found:
            return found
    return None


def _round(
    body: Any, inputs: list[Any], within: tuple[str, ...]
) -> tuple[list[Any], NotFinite | None]:
    """Returns the outputs of one round of a loop, and the operation that spoiled them, if any."""
    outputs = core.jaxpr_as_fun(body)(*inputs)
    return outputs, _search(body, inputs, within) if any(map(_kind, outputs)) else None


# The functions that search the jaxprs of an equation; None stands for nothing bad in there.
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
    users = [frame for frame in frames if not frame.startswith(libraries)]
    lines = dict.fromkeys([*users[:1], *frames[:1]])
    place = ", in ".join(frame.rpartition("/")[2] for frame in lines)
    return "  ".join(filter(None, [str(eqn.source_info.name_stack), place]))


_DEPTH = 200  # of calls; those of a step within a deep model are some tens
_LIBRARIES = ("bridge", "flax", "functrain", "keras", "optax")
