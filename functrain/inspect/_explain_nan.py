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
from functrain.rewrites._equations import split_inputs
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
      cause: The operation that made the infinity which led to its NaN; ``input`` if that infinity
        was in the state or the batch.
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
        is_of_state = self.operation == "input" and self.location.startswith("state")
        if is_of_state and self.bad_values.startswith("NaN"):
            lines.append(
                "  An earlier step made it. Go back one step: pass the state before that step, and "
                "its batch."
            )
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
    are ignored. If an infinity caused the NaN, `cause` is the operation that made the infinity, or
    the leaf of the state or the batch that held it. Other infinities in the state or the batch are
    reported only if no operation made one, or NaN. Constants of the step, such as ``jnp.nan``, are
    not named.

    Args:
      state: The state before the step, without metrics. Not changed.
      step: ``(state, batch) -> (state, logs)``, with metrics or without; not jitted.
      batch: The batch.

    Returns:
      The operation, which prints as text; None if everything is finite, or only a constant is
      not.

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
    infinite_leaves: dict[int, NotFinite] = {}
    for i, (path, x) in enumerate(leaves):
        x = np.asarray(x) if isinstance(x, float | complex) else x
        if kind := _bad_kind(x):
            leaf = NotFinite("input", _count_bad(x, kind), path)
            if kind == "nan":
                return leaf
            infinite_leaves[i] = leaf
    with tracing_guards():
        closed: Any = jax.make_jaxpr(step)(state, batch)
    culprit, inputs = _Program(closed, jax.tree.leaves((state, batch)), ()).search()
    if culprit is None:
        # Infinities may be meant, as that of the best loss so far.
        return next(iter(infinite_leaves.values()), None)
    if culprit.cause is None and inputs:
        culprit = dataclasses.replace(culprit, cause=infinite_leaves[min(inputs)])
    if culprit.out_of_range is None:
        return culprit
    source = _find_leaf(culprit.out_of_range, batch)
    return dataclasses.replace(culprit, out_of_range=culprit.out_of_range._replace(leaf=source))


class _Origin(NamedTuple):
    """Where NaN or infinities come from.

    Attributes:
      culprit: The operation that made them; None if there is none.
      inputs: The inputs of the program whose infinities they trace back to, by their indices.
    """

    culprit: NotFinite | None = None
    inputs: frozenset[int] = frozenset()

    def shift(self, offset: int) -> "_Origin":
        """Returns the same origin for a program that has more inputs in front."""
        return self._replace(inputs=frozenset(i + offset for i in self.inputs))

    def follow(self, origins: Sequence["_Origin"]) -> "_Origin":
        """Goes further back, from the inputs to their own origins."""
        inner = [origins[i] for i in sorted(self.inputs)]
        culprits = [origin.culprit for origin in inner if origin.culprit is not None]
        # What made the inputs ran before.
        culprit = culprits[0] if culprits else self.culprit
        return _Origin(culprit, frozenset().union(*(origin.inputs for origin in inner)))

    def add_cause(self, infinity: "_Origin") -> "_Origin":
        """Adds the origin of the infinities that led to NaN."""
        if self.culprit is None or self.culprit.cause is not None:
            return self._replace(inputs=frozenset())
        return _Origin(
            dataclasses.replace(self.culprit, cause=infinity.culprit),
            frozenset() if infinity.culprit else infinity.inputs,
        )


class _Program:
    """A jaxpr with the values of all its variables."""

    def __init__(
        self, closed: Any, inputs: Sequence[Any], within: tuple[str, ...], first_input: int = 0
    ) -> None:
        """Evaluates a jaxpr.

        Args:
          closed: The jaxpr.
          inputs: Its inputs.
          within: The loops and branches around it.
          first_input: The index of its first input among those of the equation that it belongs to.
        """
        self.jaxpr, self.within, self.first_input = closed.jaxpr, within, first_input
        self.results = [var for eqn in self.jaxpr.eqns for var in eqn.outvars]
        variables = (*self.jaxpr.constvars, *self.jaxpr.invars)
        self.values = dict(zip(variables, (*closed.consts, *inputs), strict=True))
        values = _evaluate(self.jaxpr, self.jaxpr.eqns, self.results, self.values)
        self.values.update(zip(self.results, values, strict=True))

    def search(self) -> _Origin:
        """Returns the operation that made the first NaN or infinity, of a whole step."""
        # NaN first: an infinity in the result may be intended, as in a mask.
        if (origin := self.search_nan()).culprit is not None:
            return origin
        if infinity := self.trace(range(len(self.jaxpr.outvars))).culprit:
            return _Origin(infinity)
        # An infinity may also replace NaN, and a body may return one that no operation made.
        if (eqn := self._find_origin(self.jaxpr.outvars, ("nan", "inf"))) is not None:
            return self._explain(eqn)
        if (eqn := self._find_origin(self.results, ("nan",))) is None:
            return _Origin()
        culprit, inputs = self._explain(eqn)
        assert culprit is not None
        return _Origin(dataclasses.replace(culprit, reaches_output=False), inputs)

    def search_nan(self) -> _Origin:
        """Returns the operation that made the first NaN in the outputs."""
        eqn = self._find_origin(self.jaxpr.outvars, ("nan",))
        return _Origin() if eqn is None else self._explain(eqn)

    def trace(self, outputs: Iterable[int]) -> _Origin:
        """Goes back from infinities in some outputs to the first operation that made one."""
        return self._trace([self.jaxpr.outvars[i] for i in outputs])

    def _trace(self, atoms: Iterable[Any]) -> _Origin:
        # Without literals: no equation made them.
        infinite = {x for x in atoms if _is_variable(x) and _has_infinity(self.values[x])}
        culprit = None
        for eqn in reversed(self.jaxpr.eqns):
            outputs = [i for i, var in enumerate(eqn.outvars) if var in infinite]
            if outputs:
                origin = self._trace_equation(eqn, outputs)
                # The last one set is the first in the program.
                culprit = origin.culprit or culprit
                infinite.update(filter(_is_variable, (eqn.invars[i] for i in origin.inputs)))
        inputs = (i for i, var in enumerate(self.jaxpr.invars) if var in infinite)
        return _Origin(culprit, frozenset(inputs))

    def _trace_equation(self, eqn: core.JaxprEqn, outputs: list[int]) -> _Origin:
        """Returns the origin of infinities in some outputs of an equation, by its inputs."""
        if (body := self._body(eqn)) is not None:
            return _locate(body.trace(outputs).shift(body.first_input), eqn)
        if inputs := self._infinite_inputs(eqn):
            return _Origin(None, inputs)
        return _Origin(self._describe(eqn, eqn.outvars[outputs[0]], "inf"))

    def _find_origin(self, atoms: Sequence[Any], kinds: tuple[str, ...]) -> core.JaxprEqn | None:
        """Goes back from bad values to the first operation that made one from good inputs."""

        def is_bad(atom: Any) -> bool:
            return _bad_kind(self._read(atom)) in kinds

        origin = None
        bad = set(filter(is_bad, filter(_is_variable, atoms)))
        for eqn in reversed(self.jaxpr.eqns):
            if not bad.isdisjoint(eqn.outvars):
                bad_inputs = list(filter(is_bad, eqn.invars))
                bad.update(filter(_is_variable, bad_inputs))
                origin = origin if bad_inputs else eqn
        return origin

    def _explain(self, eqn: core.JaxprEqn) -> _Origin:
        """Returns the operation that made NaN in an equation, or else an infinity."""
        origin = _Origin()
        if (body := self._body(eqn)) is not None:
            origin = _locate(body.search_nan().shift(body.first_input), eqn)
        if origin.culprit is None:
            output = next(var for var in eqn.outvars if _bad_kind(self.values[var]))
            inputs = self._infinite_inputs(eqn) if self._needs_infinities(eqn) else frozenset()
            kind = _bad_kind(self.values[output])
            origin = _Origin(self._describe(eqn, output, kind), inputs)
        return origin.add_cause(self._trace(eqn.invars[i] for i in origin.inputs))

    def _describe(self, eqn: core.JaxprEqn, output: Any, kind: str) -> NotFinite:
        args = list(map(self._read, eqn.invars))
        return NotFinite(
            eqn.primitive.name,
            _count_bad(self.values[output], kind),
            _location(eqn),
            tuple(map(_range, args)),
            self.within,
            out_of_range=_out_of_range(eqn, args) if eqn.primitive is primitives.gather_p else None,
        )

    def _needs_infinities(self, eqn: core.JaxprEqn) -> bool:
        """Returns True if an equation makes fewer NaN with 1 in place of the infinities."""
        values = {var: self.values[var] for var in filter(_is_variable, eqn.invars)}
        finite = {var: _replace_infinities(x) for var, x in values.items()}
        outputs = _evaluate(self.jaxpr, [eqn], eqn.outvars, finite)
        return _count_nan(outputs) < _count_nan(self.values[var] for var in eqn.outvars)

    def _infinite_inputs(self, eqn: core.JaxprEqn) -> frozenset[int]:
        return frozenset(i for i, x in enumerate(eqn.invars) if _has_infinity(self._read(x)))

    def _body(self, eqn: core.JaxprEqn) -> "_Program | _Loop | None":
        enter = _BODIES.get(eqn.primitive)
        return enter and enter(eqn, list(map(self._read, eqn.invars)), self.within)

    def _read(self, atom: Any) -> Any:
        if _is_variable(atom):
            return self.values[atom]
        # Constants in the program are literals, which hold their value: an array or a number.
        return np.asarray(atom.val, atom.aval.dtype)


def _locate(origin: _Origin, eqn: core.JaxprEqn) -> _Origin:
    """Gives a culprit in a body without source lines the location of the equation around it."""
    # Code that jax keeps traced, such as take_along_axis, has no source lines of the user.
    if origin.culprit is None or origin.culprit.location:
        return origin
    return origin._replace(culprit=dataclasses.replace(origin.culprit, location=_location(eqn)))


def _is_variable(atom: Any) -> bool:
    """Returns True unless an input of an equation is a literal."""
    return isinstance(atom, core.Var)


def _evaluate(
    jaxpr: Any, eqns: Sequence[core.JaxprEqn], variables: Sequence[Any], values: dict[Any, Any]
) -> list[Any]:
    """Returns the values of variables, evaluated equation by equation.

    Args:
      jaxpr: The jaxpr of the equations.
      eqns: The equations.
      variables: Variables that they set.
      values: The values of the variables that they read.
    """
    # jax requires debug_info with a name for each input and output, and has no public way to make
    # it: take that of a function with as many inputs and outputs.
    template: Any = jax.make_jaxpr(lambda *_: [0.0] * len(variables))(*values.values())
    part = jaxpr.replace(
        constvars=[],
        invars=list(values),
        eqns=list(eqns),
        outvars=list(variables),
        debug_info=template.jaxpr.debug_info,
    )
    return list(core.jaxpr_as_fun(core.ClosedJaxpr(part, []))(*values.values()))


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


class _Iteration(NamedTuple):
    """An iteration of a loop."""

    name: str
    inputs: list[Any]
    outputs: list[Any]


class _Loop:
    """A loop, and the origins of the infinities in its carry."""

    def __init__(
        self,
        body: Any,
        iterations: Iterable[_Iteration],
        carry: range,
        within: tuple[str, ...],
        first_input: int = 0,
    ) -> None:
        """Stores what describes a loop.

        Args:
          body: The jaxpr of an iteration.
          iterations: The iterations. They are run once, by a search.
          carry: The indices of the carry among the inputs of the body.
          within: The loops and branches around it.
          first_input: The index of the body's first input among those of the loop.
        """
        self.body, self.iterations, self.carry = body, iterations, carry
        self.within, self.first_input = within, first_input
        # By the inputs of the body. At first, all of them are inputs of the loop.
        inputs = range(len(body.jaxpr.invars))
        self.origins = [_Origin(None, frozenset([i])) for i in inputs]

    def search_nan(self) -> _Origin:
        """Returns the operation that made NaN in the first iteration which returns some."""
        for iteration in self.iterations:
            if _count_nan(iteration.outputs):
                origin = self._program(iteration).search_nan()
                if origin.culprit is not None:
                    return origin.add_cause(_Origin(None, origin.inputs).follow(self.origins))
            self._step(iteration)
        return _Origin()

    def trace(self, outputs: Sequence[int]) -> _Origin:
        """Goes back from infinities in some outputs to the first operation that made one."""
        num_carry = len(self.carry)
        stacked = [i for i in outputs if i >= num_carry]
        origins = [_Origin()] * len(self.body.jaxpr.outvars)
        for iteration in self.iterations:
            for i in stacked:
                # The first operation that made one is enough.
                if origins[i].culprit is None and _has_infinity(iteration.outputs[i]):
                    origins[i] = self._trace_iteration(iteration, i)
            self._step(iteration)
        origins[:num_carry] = [self.origins[i] for i in self.carry]
        return _Origin(None, frozenset(outputs)).follow(origins)

    def _step(self, iteration: _Iteration) -> None:
        """Sets the origins of the carry to those after an iteration."""
        origins = list(self.origins)
        for output, i in enumerate(self.carry):
            if not _has_infinity(iteration.outputs[output]):
                origins[i] = _Origin()
            # An infinity that stays needs no further search: each would run the body again.
            elif origins[i].culprit is None or not _has_infinity(iteration.inputs[i]):
                origins[i] = self._trace_iteration(iteration, output)
        self.origins = origins

    def _trace_iteration(self, iteration: _Iteration, output: int) -> _Origin:
        return self._program(iteration).trace([output]).follow(self.origins)

    def _program(self, iteration: _Iteration) -> _Program:
        return _Program(self.body, iteration.inputs, (*self.within, iteration.name))


def _enter_call(eqn: core.JaxprEqn, inputs: list[Any], within: tuple[str, ...]) -> _Program | None:
    # The name of the parameter depends on the primitive.
    body = eqn.params.get("jaxpr", eqn.params.get("call_jaxpr"))
    if body is None:
        return None
    closed = body if hasattr(body, "consts") else core.ClosedJaxpr(body, [])
    return _Program(closed, inputs, within)


def _enter_cond(eqn: core.JaxprEqn, inputs: list[Any], within: tuple[str, ...]) -> _Program:
    index = int(inputs[0])
    branch = eqn.params["branches"][index]
    return _Program(branch, inputs[1:], (*within, f"cond, branch {index}"), first_input=1)


def _enter_scan(eqn: core.JaxprEqn, inputs: list[Any], within: tuple[str, ...]) -> _Loop:
    length, run = eqn.params["length"], core.jaxpr_as_fun(eqn.params["jaxpr"])
    consts, carry, xs = split_inputs(inputs, eqn)

    def iterations() -> Iterator[_Iteration]:
        state = list(carry.values())
        for i in range(length - 1, -1, -1) if eqn.params["reverse"] else range(length):
            args = [*consts.values(), *state, *(x[i] for x in xs.values())]
            outputs = run(*args)
            yield _Iteration(f"scan, iteration {i}", args, outputs)
            state = outputs[: len(carry)]

    indices = range(len(consts), len(consts) + len(carry))
    return _Loop(eqn.params["jaxpr"], iterations(), indices, within)


def _enter_while(eqn: core.JaxprEqn, inputs: list[Any], within: tuple[str, ...]) -> _Loop:
    condition, run = map(core.jaxpr_as_fun, (eqn.params["cond_jaxpr"], eqn.params["body_jaxpr"]))
    # The inputs are the constants of the condition, those of the body, and the carry.
    num_condition, num_body = eqn.params["cond_nconsts"], eqn.params["body_nconsts"]
    consts, args = inputs[:num_condition], inputs[num_condition:]

    def iterations() -> Iterator[_Iteration]:
        carry = args[num_body:]
        for i in itertools.count():
            if not condition(*consts, *carry)[0]:
                return
            body_inputs = [*args[:num_body], *carry]
            carry = run(*body_inputs)
            yield _Iteration(f"while, iteration {i}", body_inputs, carry)

    indices = range(num_body, len(args))
    return _Loop(eqn.params["body_jaxpr"], iterations(), indices, within, num_condition)


# The functions that enter the body of an equation. They return None if it cannot be read.
_BODIES: dict[
    Any, Callable[[core.JaxprEqn, list[Any], tuple[str, ...]], _Program | _Loop | None]
] = {
    primitives.jit_p: _enter_call,
    primitives.call_p: _enter_call,
    primitives.closed_call_p: _enter_call,
    primitives.remat_p: _enter_call,
    primitives.custom_jvp_call_p: _enter_call,
    primitives.custom_vjp_call_p: _enter_call,
    primitives.cond_p: _enter_cond,
    primitives.scan_p: _enter_scan,
    primitives.while_p: _enter_while,
}


def _bad_kind(x: Any) -> str:
    """Returns "nan", or "inf", or "" if all values are finite or not numbers."""
    if _count_nan([x]):
        return "nan"
    return "inf" if _has_infinity(x) else ""


def _has_infinity(x: Any) -> bool:
    return _is_inexact(x) and bool(np.isinf(_to_float64(x)).any())


def _count_nan(values: Iterable[Any]) -> int:
    return sum(int(np.isnan(_to_float64(x)).sum()) for x in values if _is_inexact(x))


def _is_inexact(x: Any) -> bool:
    # Leaves of the state and the batch may be Python numbers.
    dtype = getattr(x, "dtype", type(x))
    return jnp.issubdtype(dtype, jnp.inexact)


def _replace_infinities(x: Any) -> Any:
    """Returns an array with 1 in place of infinities."""
    return jnp.where(jnp.isinf(x), jnp.ones_like(x), x) if _has_infinity(x) else x


def _to_float64(x: Any) -> np.ndarray[Any, Any]:
    """Returns an array in float64 or complex128, whatever its precision."""
    is_complex = jnp.iscomplexobj(x)
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
