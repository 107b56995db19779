"""Tells what the rewrites do to a function, and why."""

import dataclasses
import functools
import inspect
from collections.abc import Callable, Iterator
from typing import Any

import jax
from jax.extend import core
from jax.extend.core import primitives

from functrain.common._types import traits_of
from functrain.inspect._sheet import sheet
from functrain.rewrites import _optimize
from functrain.rewrites._frame import (
    equations,
    first_that_applies,
    is_entered,
    place,
    that_pay_in,
    types,
)
from functrain.rewrites._optimize import Mode, Untraceable
from functrain.rewrites._rounding import perhaps_unrounded

# Found all over a step: shown where a rewrite would take them, counted elsewhere.
_EVERYWHERE = {primitives.dot_general_p, primitives.reduce_sum_p}


@dataclasses.dataclass(frozen=True)
class Row:
    """Equal equations of a program, and the rewrite that replaces them.

    Attributes:
      primitive: Its name.
      shapes: Types of inputs and outputs, such as ``f32[8] -> f32[]``.
      count: The number of these equations.
      rule: The rewrite that replaces them, "" where they are left.
      reason: Why they are replaced, or left.
      where: The layer the first of them came from, if it has a name, and its source line.
    """

    primitive: str
    shapes: str
    count: int
    rule: str
    reason: str
    where: str


@dataclasses.dataclass(frozen=True, repr=False)
class Explanation:
    """The result of `explain`; prints as a table.

    Attributes:
      rows: The equations that some rewrite looks at, in the order they come; products and sums only
        where a rewrite would take them.
      others: The number of other equations.
      note: Why nothing at all is rewritten, or which rewrites failed; "" in any other case.

    Examples:
      >>> print(Explanation(rows=(), others=3, note=""))
      Nothing to rewrite. 3 equations that no rewrite looks at.
    """

    rows: tuple[Row, ...]
    others: int
    note: str

    def __repr__(self) -> str:
        others = f"{self.others} equations that no rewrite looks at."
        if not self.rows:
            return f"{self.note or 'Nothing to rewrite.'} {others if self.others else ''}".rstrip()
        columns = ("operation", "types", "count", "rewritten by", "why", "first met in")
        cells = (map(str, dataclasses.astuple(row)) for row in self.rows)
        table = sheet(columns, map(tuple, cells), numbers=("count",))
        return "\n".join(filter(None, [self.note, table, f"And {others}"]))


def explain_rewrites(
    fn: Callable[..., Any], /, *args: Any, rewrites: Mode = "auto", **kwargs: Any
) -> Explanation:
    """Explains which operations of a function `optimize` rewrites, and why.

    Args:
      fn: As for `optimize`: any function, or the step you fuse or fit (not the fused program). One
        with metrics takes a state, bare or started.
      *args: Its arguments. Shapes will do (`jax.ShapeDtypeStruct`): nothing is computed.
      rewrites: As for `optimize`.
      **kwargs: Its arguments by keyword.

    Returns:
      An Explanation: print it. A row for each kind of equation that some rewrite looks at, with
      the rewrite, or the reason it is left; and a note where nothing is rewritten, because `fn`
      cannot be traced, a rewrite failed, or rewrites are off here.

    Raises:
      ValueError: As `optimize`.
      TypeError: The arguments are not those that `fn` takes.

    Examples:
      >>> import jax, jax.numpy as jnp
      >>> def fn(image, kernel):
      ...     return jax.lax.conv(image, kernel, (1, 1), "SAME")
      >>> explanation = explain_rewrites(fn, jnp.ones((2, 3, 8, 8)), jnp.ones((4, 3, 3, 3)))
      >>> row = explanation.rows[0]
      >>> row.rule, row.count, row.shapes
      ('canonical_conv', 1, 'f32[2,3,8,8] f32[4,3,3,3] -> f32[2,4,8,8]')
    """
    chosen = _optimize.mode(rewrites)
    _check_arguments(fn, args, kwargs)
    if args:
        args = traits_of(fn).wrap_state(args[0]), *args[1:]
    try:
        closed, _ = _optimize.traced(fn, *args, **kwargs)
    except Untraceable as error:
        return Explanation((), 0, f"Runs as it was, for {error}")
    if chosen == "off":
        note = f"Runs as it was: rewrites are off (backend: {jax.default_backend()})."
        return _explanation(closed, lambda eqn, _: _left(eqn, "rewrites are off"), note)
    failures = _optimize.rewritten(closed, chosen)[1]
    note = "\n".join(f"A rewrite failed and is left out: {failure}" for failure in failures)
    failed = [getattr(failure, "rewrite", None) for failure in failures]
    rules = [] if None in failed else [rule for rule in _optimize.REWRITES if rule not in failed]
    rules = that_pay_in(closed, rules)
    unknown = functools.cache(perhaps_unrounded)

    def verdict(eqn: core.JaxprEqn, jaxpr: core.Jaxpr) -> tuple[str, str]:
        """Returns the name and the reason of the rule, or "" and why there is none."""
        rule = first_that_applies(rules, eqn, jaxpr)
        if rule is None:
            return _left(eqn, "none is known to pay here")
        if chosen == "auto":
            return rule.name, rule.reason
        exact = first_that_applies(rules, eqn, jaxpr, exact=True)
        if exact and not unknown(jaxpr).intersection(eqn.outvars):
            return exact.name, exact.reason
        return "", f'{rule.name} changes last bits; rewrites="auto" takes it'

    return _explanation(closed, verdict, note)


def _check_arguments(fn: Callable[..., Any], args: Any, kwargs: Any) -> None:
    """Raises TypeError unless the function takes these arguments."""
    try:
        signature = inspect.signature(fn)
    except (TypeError, ValueError):  # a callable without a signature, or none: traced says so
        return
    try:
        signature.bind(*args, **kwargs)
    except TypeError as error:
        raise TypeError(
            f"explain_rewrites: expected the arguments of fn after it, "
            f"explain_rewrites(fn, *args), fn{signature}; "
            f"{error}. A step takes (state, batch): make one of a loss with train_step."
        ) from None


def _explanation(
    closed: Any, verdict: Callable[[core.JaxprEqn, core.Jaxpr], tuple[str, str]], note: str
) -> Explanation:
    looked_at = {rule.primitive for rule in _optimize.REWRITES}
    alike: dict[tuple[str, ...], list[core.JaxprEqn]] = {}
    others = 0
    for eqn, jaxpr, inside in _all(closed):
        rule, reason = _left(eqn, inside) if inside else verdict(eqn, jaxpr)
        if eqn.primitive not in looked_at or not (rule or reason):
            others += 1
            continue
        alike.setdefault((eqn.primitive.name, types(eqn), rule, reason), []).append(eqn)
    rows = [
        Row(name, shapes, len(eqns), rule, reason, place(eqns[0]))
        for (name, shapes, rule, reason), eqns in alike.items()
    ]
    return Explanation(tuple(rows), others, note)


def _left(eqn: core.JaxprEqn, why: str) -> tuple[str, str]:
    """Returns no rule, and why an equation is left unless every step is full of its kind."""
    return "", "" if eqn.primitive in _EVERYWHERE else why


def _all(jaxpr: Any) -> Iterator[tuple[core.JaxprEqn, core.Jaxpr, str]]:
    """Yields each equation, the jaxpr around it, and why no rewrite reaches it, or ""."""
    for eqn, around, _ in equations(jaxpr):
        yield eqn, around, ""
        if not is_entered(eqn):
            for inner in core.jaxprs_in_params(eqn.params):
                for deeper, where, _ in _all(inner):
                    yield deeper, where, f"inside {eqn.primitive.name}, which no rewrite may enter"
