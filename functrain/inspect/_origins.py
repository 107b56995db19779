"""A run of a jaxpr, operation by operation, that follows NaN and infinities from their origins."""

import itertools
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jax.extend import core
from jax.extend.core import JaxprEqn, primitives

from functrain.inspect._not_finite import (
    NotFinite,
    count_bad,
    count_nan,
    describe_range,
    has_infinity,
    has_nan,
    out_of_range,
    source_location,
)
from functrain.rewrites._equations import split_inputs


class Event(NamedTuple):
    """An operation, or an input of the step, that is not finite. Events compare by their order.

    Attributes:
      is_nan: True for NaN, False for infinities. An infinity may replace NaN: it has the event of
        that NaN, unless another one led to it.
      is_input: True for an input. Operations come first: infinities in a state may be meant.
      position: The number of events before it.
      description: The operation or the input.
    """

    is_nan: bool
    is_input: bool
    position: int
    description: NotFinite


class Value(NamedTuple):
    """The value of a variable, and the first events that led to its NaN and to its infinities.

    The events are None for a value that has no NaN or infinities, and for those of constants.
    """

    array: Any
    nan: Event | None = None
    infinity: Event | None = None


class Search:
    """A run that collects the operations which make NaN or infinities from finite inputs.

    Attributes:
      events: All of them, in the order of the run.
    """

    def __init__(self) -> None:
        self.events: list[Event] = []
        # The name and location of each loop, branch and call around the operation that runs.
        self._around: list[tuple[str, str]] = []

    def add(self, description: NotFinite, *, is_nan: bool = False) -> Event:
        """Returns a new event."""
        is_input = description.operation == "input"
        self.events.append(Event(is_nan, is_input, len(self.events), description))
        return self.events[-1]

    def run(self, closed: Any, inputs: Sequence[Value]) -> list[Value]:
        """Returns the outputs of a jaxpr."""
        jaxpr = closed.jaxpr
        values: dict[Any, Value] = dict(zip(jaxpr.invars, inputs, strict=True))
        values |= zip(jaxpr.constvars, map(Value, closed.consts), strict=True)
        results = [var for eqn in jaxpr.eqns for var in eqn.outvars]
        values |= zip(results, _evaluate(jaxpr, jaxpr.eqns, results, values), strict=True)

        def read(atom: Any) -> Value:
            if isinstance(atom, core.Var):
                return values[atom]
            # Constants in the program are literals, which hold an array or a number.
            return Value(np.asarray(atom.val, atom.aval.dtype))

        for eqn in jaxpr.eqns:
            outputs = [values[var] for var in eqn.outvars]
            # Bodies are entered only if something that is not finite leaves them.
            if any(has_nan(x.array) or has_infinity(x.array) for x in outputs):
                traced = self._trace(jaxpr, eqn, list(map(read, eqn.invars)), outputs)
                values |= zip(eqn.outvars, traced, strict=True)
        return list(map(read, jaxpr.outvars))

    def run_body(
        self, eqn: JaxprEqn, body: Any, inputs: Sequence[Value], name: str = ""
    ) -> list[Value]:
        """Returns the outputs of a jaxpr inside an equation; `name` is the branch or iteration."""
        self._around.append((name, source_location(eqn)))
        outputs = self.run(body, inputs)
        self._around.pop()
        return outputs

    def _trace(
        self, jaxpr: Any, eqn: JaxprEqn, inputs: list[Value], outputs: list[Value]
    ) -> list[Value]:
        """Returns the outputs of an equation with their events, which are new if it made them."""
        body = _BODIES.get(eqn.primitive)
        inner = body(self, eqn, inputs) if body else outputs
        nan_inputs = [x.nan for x in inputs if has_nan(x.array)]
        infinite_inputs = [x.infinity for x in inputs if has_infinity(x.array)]
        traced = []
        for (array, *_), (_, nan, infinity) in zip(outputs, inner, strict=True):
            if has_nan(array) and not nan:
                # NaN of the inputs came first. Constants among them have no event.
                nan = _first(nan_inputs)
                if not nan_inputs:
                    cause = _first(infinite_inputs)
                    if cause and not _needs_infinities(jaxpr, eqn, inputs, outputs):
                        cause = None
                    nan = self._add_equation(eqn, inputs, array, True, cause)
            # Infinities of a body without an event are constants in it.
            if has_infinity(array) and not infinity and not body:
                infinity = _first(infinite_inputs) or _first(nan_inputs)
                if not infinite_inputs and not nan_inputs:
                    infinity = self._add_equation(eqn, inputs, array, False)
            traced.append(Value(array, nan, infinity))
        return traced

    def _add_equation(
        self, eqn: JaxprEqn, inputs: list[Value], out: Any, is_nan: bool, cause: Event | None = None
    ) -> Event:
        # Code that jax keeps traced, such as take_along_axis, has no source lines of the user.
        locations = [source_location(eqn), *(location for _, location in reversed(self._around))]
        arrays = [x.array for x in inputs]
        is_gather = eqn.primitive is primitives.gather_p
        description = NotFinite(
            eqn.primitive.name,
            count_bad(out, is_nan=is_nan),
            next(filter(None, locations), ""),
            tuple(map(describe_range, arrays)),
            tuple(name for name, _ in self._around if name),
            cause=cause.description if cause and not cause.is_nan else None,
            out_of_range=out_of_range(eqn, *arrays[:2]) if is_gather else None,
        )
        return self.add(description, is_nan=is_nan)


def _first(events: Iterable[Event | None]) -> Event | None:
    return min(filter(None, events), default=None)


def _evaluate(
    jaxpr: Any, eqns: Sequence[JaxprEqn], outvars: Sequence[Any], values: dict[Any, Value]
) -> list[Value]:
    """Returns the variables that equations compute from the given ones."""
    # The names of the inputs and outputs of the whole jaxpr do not fit those of its part.
    debug_info = jaxpr.debug_info._replace(arg_names=None, result_paths=None)
    part = jaxpr.replace(
        constvars=[],
        invars=list(values),
        eqns=list(eqns),
        outvars=list(outvars),
        debug_info=debug_info,
    )
    run: Any = core.jaxpr_as_fun(core.ClosedJaxpr(part, []))
    return list(map(Value, run(*(x.array for x in values.values()))))


def _needs_infinities(jaxpr: Any, eqn: JaxprEqn, inputs: list[Value], outputs: list[Value]) -> bool:
    """Returns True if an equation makes fewer NaN with 1 in place of the infinities."""
    finite = {}
    for var, (x, *_) in zip(eqn.invars, inputs, strict=True):
        if isinstance(var, core.Var):
            finite[var] = Value(jnp.where(jnp.isinf(x), 1, x) if has_infinity(x) else x)
    changed = _evaluate(jaxpr, [eqn], eqn.outvars, finite)
    counts = [count_nan(x.array for x in values) for values in (changed, outputs)]
    return counts[0] < counts[1]


def _call(search: Search, eqn: JaxprEqn, inputs: list[Value]) -> list[Value]:
    # The name of the parameter depends on the primitive.
    body: Any = eqn.params.get("jaxpr", eqn.params.get("call_jaxpr"))
    closed = body if hasattr(body, "consts") else core.ClosedJaxpr(body, [])
    return search.run_body(eqn, closed, inputs)


def _cond(search: Search, eqn: JaxprEqn, inputs: list[Value]) -> list[Value]:
    index = int(inputs[0].array)
    return search.run_body(eqn, eqn.params["branches"][index], inputs[1:], f"cond, branch {index}")


def _scan(search: Search, eqn: JaxprEqn, inputs: list[Value]) -> list[Value]:
    consts, carry, xs = (list(part.values()) for part in split_inputs(inputs, eqn))
    stacked = [Value(None)] * (len(eqn.outvars) - len(carry))
    iterations = range(eqn.params["length"])
    for i in reversed(iterations) if eqn.params["reverse"] else iterations:
        rows = [x._replace(array=x.array[i]) for x in xs]
        outputs = search.run_body(
            eqn, eqn.params["jaxpr"], [*consts, *carry, *rows], f"scan, iteration {i}"
        )
        carry = outputs[: len(carry)]
        stacked = [
            Value(None, _first([x.nan, y.nan]), _first([x.infinity, y.infinity]))
            for x, y in zip(stacked, outputs[len(carry) :], strict=True)
        ]
    return [*carry, *stacked]


def _while(search: Search, eqn: JaxprEqn, inputs: list[Value]) -> list[Value]:
    # The inputs are the constants of the condition, those of the body, and the carry.
    start = eqn.params["cond_nconsts"]
    end = start + eqn.params["body_nconsts"]
    consts, carry = inputs[start:end], inputs[end:]
    condition: Any = core.jaxpr_as_fun(eqn.params["cond_jaxpr"])
    for i in itertools.count():
        if not condition(*(x.array for x in (*inputs[:start], *carry)))[0]:
            break
        body = eqn.params["body_jaxpr"]
        carry = search.run_body(eqn, body, [*consts, *carry], f"while, iteration {i}")
    return carry


# The functions that run the bodies of equations. Those of other primitives cannot be read.
_BODIES: dict[Any, Callable[[Search, JaxprEqn, list[Value]], list[Value]]] = {
    primitives.jit_p: _call,
    primitives.call_p: _call,
    primitives.closed_call_p: _call,
    primitives.remat_p: _call,
    primitives.custom_jvp_call_p: _call,
    primitives.custom_vjp_call_p: _call,
    primitives.cond_p: _cond,
    primitives.scan_p: _scan,
    primitives.while_p: _while,
}
