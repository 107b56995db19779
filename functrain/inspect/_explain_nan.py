"""A search for the operation that made the first NaN or infinity."""

import dataclasses
import itertools
import sys
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
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
from functrain.rewrites._scans import split_inputs
from functrain.step._check import check_step


class OutOfRange(NamedTuple):
    """Indices of a gather that are out of range: it returns NaN for them.

    Attributes:
      size: Length of the axis, such as the number of classes.
      indices: The unique indices that are out of range, after `size` was added to negative ones.
      leaf: The integers of the batch that the indices come from, such as labels, with their range;
        empty if unknown.
    """

    size: int
    indices: tuple[int, ...]
    leaf: str = ""

    def __str__(self) -> str:
        indices = ", ".join(map(str, self.indices[:5])) + ", ..." * (len(self.indices) > 5)
        source = f" They come from {self.leaf}." if self.leaf else ""
        return f"Indices outside of [0, {self.size}) return NaN: {indices}.{source}"


@dataclasses.dataclass(frozen=True)
class NotFinite:
    """An operation that made NaN or an infinity from finite inputs.

    Attributes:
      operation: Its name in JAX, such as ``log``; ``input`` if the state or the batch holds NaN or
        an infinity.
      bad_values: The bad values of its output, such as ``NaN in 3 of 8``.
      location: The layer, if it has a name, and your source line, followed by the line of the
        library that it calls; the path of an input.
      inputs: The dtype, shape and range of each input.
      within: The loops and branches around it, the outermost first, such as
        ``scan, iteration 7``.
      reaches_output: True if an output of the step is not finite because of it.
      cause: The operation that made an infinity among its inputs.
      out_of_range: For a gather, the indices that are out of range, such as labels above the
        number of classes.

    Examples:
      >>> print(NotFinite("log", "-inf in 1 of 2", "net.py:3", ("float32[2]: 0 to 1",)))
      log: -inf in 1 of 2 values
        location: net.py:3
        input: float32[2]: 0 to 1
    """

    operation: str
    bad_values: str
    location: str
    inputs: tuple[str, ...] = ()
    within: tuple[str, ...] = ()
    reaches_output: bool = True
    cause: "NotFinite | None" = None
    out_of_range: OutOfRange | None = None

    def __str__(self) -> str:
        lines = [f"{self.operation}: {self.bad_values} values"]
        lines += [f"  location: {self.location}"] * bool(self.location)
        lines += map("  within: {}".format, self.within)
        lines += map("  input: {}".format, self.inputs)
        if self.out_of_range is not None:
            lines.append(f"  {self.out_of_range}")
        if not self.reaches_output:
            lines.append("  The outputs of the step do not depend on these values.")
        if self.cause is not None:
            lines += ["The infinity came from", str(self.cause)]
        return "\n".join(lines)


def explain_nan(state: PyTree, step: Any, batch: PyTree) -> NotFinite | None:
    """Finds the operation of a step that made the first NaN or infinity.

    The step runs uncompiled, operation by operation, so it is slow, and a compiled program may
    round differently. The operation is the first whose output has NaN while its inputs have none,
    and which led to the NaN in the result, so infinities that do no harm, such as those of masks,
    are ignored. If an infinity caused the NaN, `cause` is the operation that made the infinity. An
    infinity in the state or the batch is reported only if no operation made one, or NaN.

    Args:
      state: The state before the step, without metrics. Not changed.
      step: ``(state, batch) -> (state, logs)``, with metrics or without; not jitted.
      batch: The batch.

    Returns:
      The operation, which prints as text; None if everything is finite.

    Raises:
      TypeError: `step` is not a step.

    Examples:
      >>> import jax.numpy as jnp
      >>> def step(w, x):
      ...     return w - jnp.log(x - 1.0).sum(), {}
      >>> culprit = explain_nan(jnp.zeros(()), step, jnp.array([2.0, 1.0]))
      >>> print(culprit.operation, "|", culprit.bad_values, "|", culprit.inputs[0])
      log | -inf in 1 of 2 | float32[2]: 0 to 1
    """
    check_step(step)
    require_batch(batch)
    state = traits_of(step).wrap_state(state)
    # The leaves in the order of the step's arguments. jax would sort the keys of a plain dict.
    leaves = _tree.leaves_with_path(OrderedDict(state=state, batch=batch))
    bad_inputs: dict[str, NotFinite] = {}
    for path, x in leaves:
        x = np.asarray(x) if isinstance(x, float | complex) else x
        if kind := _bad_kind(x):
            bad_inputs.setdefault(kind, NotFinite("input", _count_bad(x, kind), path))
    if "nan" in bad_inputs:
        return bad_inputs["nan"]
    with tracing_guards(step):
        closed: Any = jax.make_jaxpr(step)(state, batch)
    culprit = _search(closed, jax.tree.leaves((state, batch)), ())
    if culprit is None:
        # Infinities may be meant, as that of the best loss so far.
        return bad_inputs.get("inf")
    if culprit.out_of_range is None:
        return culprit
    source = _find_leaf(culprit.out_of_range, batch)
    return dataclasses.replace(culprit, out_of_range=culprit.out_of_range._replace(leaf=source))


def _search(closed: Any, inputs: Sequence[Any], within: tuple[str, ...]) -> NotFinite | None:
    """Returns the operation of a jaxpr that made the first NaN or infinity in its outputs."""
    jaxpr = closed.jaxpr
    results = [var for eqn in jaxpr.eqns for var in eqn.outvars]
    values = dict(zip((*jaxpr.constvars, *jaxpr.invars), (*closed.consts, *inputs), strict=True))
    values.update(zip(results, _evaluate(closed, results, inputs), strict=True))

    # Constants in the program are literals, which hold their value.
    def read(atom: Any) -> Any:
        return atom.val if isinstance(atom, core.Literal) else values[atom]

    def find_origin(atoms: Sequence[Any], kinds: tuple[str, ...]) -> core.JaxprEqn | None:
        """Goes back from bad values to the first operation that made one from good inputs."""

        def is_bad(atom: Any) -> bool:
            return _bad_kind(read(atom)) in kinds

        origin = None
        # Without literals: no equation made them.
        bad = set(filter(is_bad, filter(_is_variable, atoms)))
        for eqn in reversed(jaxpr.eqns):
            if not bad.isdisjoint(eqn.outvars):
                bad_inputs = list(filter(is_bad, eqn.invars))
                bad.update(filter(_is_variable, bad_inputs))
                # The last one set is the first in the program.
                origin = origin if bad_inputs else eqn
        return origin

    def describe(eqn: core.JaxprEqn, reaches_output: bool = True) -> NotFinite:
        args = list(map(read, eqn.invars))
        search_body = _BODY_SEARCHES.get(eqn.primitive)
        if search_body is not None and (inner := search_body(eqn, args, within)):
            # Code that jax keeps traced, such as take_along_axis, has no source lines of the user.
            location = inner.location or _location(eqn)
            return dataclasses.replace(inner, reaches_output=reaches_output, location=location)
        bad_output = next(x for x in map(values.__getitem__, eqn.outvars) if _bad_kind(x))
        origin = find_origin(eqn.invars, ("inf",))
        return NotFinite(
            eqn.primitive.name,
            _count_bad(bad_output, _bad_kind(bad_output)),
            _location(eqn),
            tuple(map(_range, args)),
            within,
            reaches_output,
            None if origin is None else describe(origin),
            _out_of_range(eqn, args) if eqn.primitive is primitives.gather_p else None,
        )

    # NaN first: an infinity in the result may be intended, as in a mask.
    for kinds in (("nan",), ("nan", "inf")):
        if (eqn := find_origin(jaxpr.outvars, kinds)) is not None:
            return describe(eqn)
    # A body without an origin got its bad values as inputs: the caller searches further up.
    if within:
        return None
    eqn = find_origin(results, ("nan",))
    return None if eqn is None else describe(eqn, reaches_output=False)


def _is_variable(atom: Any) -> bool:
    """Returns True unless an input of an equation is a literal."""
    return isinstance(atom, core.Var)


def _evaluate(closed: Any, variables: list[Any], inputs: Sequence[Any]) -> list[Any]:
    """Returns the values of variables of a jaxpr, evaluated equation by equation."""
    # jax requires debug_info with a name for each input and output, and has no public way to make
    # it: take that of a function with as many inputs and outputs.
    template: Any = jax.make_jaxpr(lambda *_: [0.0] * len(variables))(*inputs)
    every = closed.jaxpr.replace(outvars=variables, debug_info=template.jaxpr.debug_info)
    return list(core.jaxpr_as_fun(closed.replace(jaxpr=every))(*inputs))


def _out_of_range(eqn: core.JaxprEqn, inputs: Sequence[Any]) -> OutOfRange | None:
    """Returns the indices of a gather that are out of range, for the first axis that has some."""
    operand, indices = inputs[0], np.asarray(inputs[1])
    axes, sizes = eqn.params["dimension_numbers"].start_index_map, eqn.params["slice_sizes"]
    # A gather takes slices. One that starts after `last` would end outside of the axis.
    for column, axis in enumerate(axes):
        starts, last = indices[..., column], operand.shape[axis] - sizes[axis]
        outside = np.unique(starts[(starts < 0) | (starts > last)])
        if outside.size:
            return OutOfRange(operand.shape[axis], tuple(outside.tolist()))
    return None


def _find_leaf(out_of_range: OutOfRange, batch: PyTree) -> str:
    """Returns the first leaf of integers that contains all of the indices, with its range."""
    for path, x in _tree.leaves_with_path({"batch": batch}):
        if _tree.is_array(x) and jnp.issubdtype(x.dtype, jnp.integer):
            values = np.unique(np.asarray(x)).astype(np.int64)
            # jax counts negative indices from the end, as NumPy does.
            indices = np.where(values < 0, values + out_of_range.size, values)
            if set(out_of_range.indices) <= set(indices.tolist()):
                return f"{path}, {_range(x)}"
    return ""


def _search_call(
    eqn: core.JaxprEqn, inputs: list[Any], within: tuple[str, ...]
) -> NotFinite | None:
    # The name of the parameter depends on the primitive.
    body = eqn.params.get("jaxpr", eqn.params.get("call_jaxpr"))
    if body is None:
        return None
    closed = body if hasattr(body, "consts") else core.ClosedJaxpr(body, [])
    return _search(closed, inputs, within)


def _search_cond(
    eqn: core.JaxprEqn, inputs: list[Any], within: tuple[str, ...]
) -> NotFinite | None:
    index = int(inputs[0])
    branch = eqn.params["branches"][index]
    return _search(branch, inputs[1:], (*within, f"cond, branch {index}"))


def _search_scan(
    eqn: core.JaxprEqn, inputs: list[Any], within: tuple[str, ...]
) -> NotFinite | None:
    length, run = eqn.params["length"], core.jaxpr_as_fun(eqn.params["jaxpr"])
    consts, carry, xs = split_inputs(inputs, eqn)

    def iterations() -> Iterator[_Iteration]:
        state = list(carry.values())
        for i in range(length - 1, -1, -1) if eqn.params["reverse"] else range(length):
            args = [*consts.values(), *state, *(x[i] for x in xs.values())]
            outputs = run(*args)
            yield _Iteration(f"scan, iteration {i}", args, outputs)
            state = outputs[: len(carry)]

    return _search_iterations(eqn.params["jaxpr"], iterations(), within)


def _search_while(
    eqn: core.JaxprEqn, inputs: list[Any], within: tuple[str, ...]
) -> NotFinite | None:
    bodies = eqn.params["cond_jaxpr"], eqn.params["body_jaxpr"]
    condition, run = map(core.jaxpr_as_fun, bodies)
    # The inputs are the constants of the condition, those of the body, and the carry.
    num_condition = eqn.params["cond_nconsts"]
    num_consts = num_condition + eqn.params["body_nconsts"]

    def iterations() -> Iterator[_Iteration]:
        carry = inputs[num_consts:]
        for i in itertools.count():
            if not condition(*inputs[:num_condition], *carry)[0]:
                return
            args = [*inputs[num_condition:num_consts], *carry]
            carry = run(*args)
            yield _Iteration(f"while, iteration {i}", args, carry)

    return _search_iterations(bodies[1], iterations(), within)


class _Iteration(NamedTuple):
    """An iteration of a loop."""

    name: str
    inputs: list[Any]
    outputs: list[Any]


def _search_iterations(
    body: Any, iterations: Iterable[_Iteration], within: tuple[str, ...]
) -> NotFinite | None:
    """Returns the operation that made the first NaN in the outputs of a body, or else infinity."""
    infinity = None
    for name, inputs, outputs in iterations:
        kinds = set(map(_bad_kind, outputs))
        if "nan" in kinds or ("inf" in kinds and infinity is None):
            culprit = _search(body, inputs, (*within, name))
            if culprit is not None and "nan" in kinds:
                return culprit
            infinity = infinity or culprit
    return infinity


# The functions that search the body of an equation. They return None if it made no bad value.
_BODY_SEARCHES: dict[Any, Callable[[Any, list[Any], tuple[str, ...]], NotFinite | None]] = {
    primitives.jit_p: _search_call,
    primitives.call_p: _search_call,
    primitives.closed_call_p: _search_call,
    primitives.remat_p: _search_call,
    primitives.custom_jvp_call_p: _search_call,
    primitives.custom_vjp_call_p: _search_call,
    primitives.cond_p: _search_cond,
    primitives.scan_p: _search_scan,
    primitives.while_p: _search_while,
}


def _bad_kind(x: Any) -> str:
    """Returns "nan", or "inf", or "" if all values are finite or not numbers."""
    if not hasattr(x, "dtype") or not jnp.issubdtype(x.dtype, jnp.inexact):
        return ""
    array = _to_float64(x)
    if np.isnan(array).any():
        return "nan"
    return "inf" if np.isinf(array).any() else ""


def _to_float64(x: Any) -> np.ndarray[Any, Any]:
    """Returns an array in float64 or complex128, whatever its precision."""
    is_complex = jnp.issubdtype(x.dtype, jnp.complexfloating)
    return np.asarray(x, np.complex128 if is_complex else np.float64)


def _count_bad(x: Any, kind: str) -> str:
    """Returns text such as "NaN in 3 of 8"."""
    array = _to_float64(x)
    bad = np.isnan(array) if kind == "nan" else np.isinf(array)
    name = "NaN" if kind == "nan" else ("-inf" if (array[bad].real < 0).all() else "inf")
    return f"{name} in {bad.sum():,} of {array.size:,}"


def _range(x: Any) -> str:
    """Returns the dtype and shape of a leaf, and the range of an array of numbers."""
    spec = _tree.spec(x)
    if not hasattr(x, "dtype") or not jnp.issubdtype(x.dtype, jnp.number) or not x.size:
        return spec
    # Complex numbers have no order: show the range of their absolute values.
    if jnp.issubdtype(x.dtype, jnp.complexfloating):
        spec, x = f"|{spec}|", jnp.abs(x)
    array = _to_float64(x).ravel()
    # fmin and fmax ignore NaN.
    low, high = f"{np.fmin.reduce(array):.6g}", f"{np.fmax.reduce(array):.6g}"
    return f"{spec}: {low}" + (f" to {high}" if high != low else "")


def _location(eqn: core.JaxprEqn) -> str:
    """Returns the layer, the user's source line, and the line of the library that it calls."""
    frames = source_info_util.summarize(eqn.source_info, num_frames=_MAX_DEPTH).splitlines()[::-1]
    # The innermost frame comes first. Beyond this file are the frames of the caller of explain_nan.
    frames = list(itertools.takewhile(lambda frame: not frame.startswith(__file__), frames))
    libraries: list[str] = []
    for name in _LIBRARIES:
        for folder in getattr(sys.modules.get(name), "__path__", ()):
            libraries.append(f"{folder}/")
    user_frames = [frame for frame in frames if not frame.startswith(tuple(libraries))]
    # A dict, so that a line that is both of them is shown once.
    lines = dict.fromkeys([*user_frames[:1], *frames[:1]])
    source = ", in ".join(frame.rpartition("/")[2] for frame in lines)
    return "  ".join(filter(None, [str(eqn.source_info.name_stack), source]))


# The most frames of the call stack that are read. A step of a deep model has some tens.
_MAX_DEPTH = 200
_LIBRARIES = ("bridge", "flax", "functrain", "keras", "optax")
