"""A table of the operations of a function that are rewritten, with reasons."""

import dataclasses
import functools
import inspect
import textwrap
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from jax.extend import core
from jax.extend.core import primitives

from functrain.common import _repr
from functrain.common._platform import compiling_for, platform_of
from functrain.common._types import traits_of
from functrain.engine._guards import tracing_guards
from functrain.rewrites import _optimize
from functrain.rewrites._equations import (
    describe_location,
    describe_types,
    is_apart,
    is_entered,
    walk_equations,
)
from functrain.rewrites._optimize import Mode, Untraceable
from functrain.rewrites._pass import inline_calls
from functrain.rewrites._rewrite import select_rewrite
from functrain.rewrites._rounding import find_inexact

_WIDTH = 80  # columns of a terminal
# A step has many of these: they are listed only if a rewrite replaces them, otherwise counted.
_COMMON = {
    primitives.broadcast_in_dim_p,
    primitives.dot_general_p,
    primitives.gather_p,
    primitives.reduce_sum_p,
    primitives.scan_p,
    primitives.scatter_add_p,
    primitives.select_n_p,
}


@dataclasses.dataclass(frozen=True)
class Row:
    """Equal equations of a program, and the rewrite that replaces them.

    Attributes:
      primitive: The name of their primitive.
      shapes: Types of inputs and outputs, such as ``float32[8] -> float32[]``.
      count: The number of these equations.
      rule: The rewrite that replaces them, "" if they are kept.
      reason: Why they are replaced, or kept.
      location: The layer that the first of them comes from, if it has a name, and its source line.
    """

    primitive: str
    shapes: str
    count: int
    rule: str
    reason: str
    location: str


@dataclasses.dataclass(frozen=True, repr=False)
class Explanation:
    """The result of `explain_rewrites`; prints as a table of at most 80 columns.

    Attributes:
      rows: The equations for which there is a rewrite, in the order of the program; products,
        sums and scans only if a rewrite replaces them.
      others: The number of other equations.
      note: Why nothing is rewritten at all, or which rewrites failed; "" otherwise.

    Examples:
      >>> print(Explanation(rows=(), others=3, note=""))
      Nothing to rewrite. 3 equations without a rewrite.
    """

    rows: tuple[Row, ...]
    others: int
    note: str

    def __repr__(self) -> str:
        plural = "s" * (self.others != 1)
        others = f"{self.others} equation{plural} without a rewrite."
        if not self.rows:
            return _wrap(f"{self.note or 'Nothing to rewrite.'} {others if self.others else ''}")
        lines = [_wrap(line) for line in self.note.splitlines()]
        return "\n".join([*lines, *_table_lines(self.rows), f"And {others}"])


def _table_lines(rows: Sequence[Row]) -> Iterator[str]:
    """Yields the lines of the table: three cells a row, and below them what is too long for one."""
    table = [("operation", "count", "rewritten by", "types", "reason", "first location")]
    for row in rows:
        details = row.shapes, row.reason, row.location
        table.append((row.primitive, str(row.count), row.rule or "-", *details))
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    for operation, count, rule, types, reason, location in table:
        yield f"{operation:<{widths[0]}}  {count:>{widths[1]}}  {rule}"
        yield _wrap(types, indent="    ")
        yield _wrap(reason, indent="    ")
        yield f"    {_repr.shorten_start(location, _WIDTH - 4)}"


def _wrap(text: str, indent: str = "") -> str:
    """Breaks a text into lines, but not within a shape."""
    # textwrap does not break lines at a no-break space.
    lines = textwrap.wrap(
        text.replace(", ", ",\N{NO-BREAK SPACE}"),
        width=_WIDTH,
        initial_indent=indent,
        subsequent_indent=indent,
        break_on_hyphens=False,
    )
    return "\n".join(lines).replace("\N{NO-BREAK SPACE}", " ")


def explain_rewrites(
    fn: Callable[..., Any], /, *args: Any, rewrites: Mode = "auto", **kwargs: Any
) -> Explanation:
    """Explains which operations of a function `optimize` rewrites, and why.

    Args:
      fn: As for `optimize`: any function, or the step that you fuse or fit (not the fused program).
        A step with metrics takes a state with or without them.
      *args: The arguments of `fn`, or their shapes (`jax.ShapeDtypeStruct`): nothing is computed.
      rewrites: As for `optimize`.
      **kwargs: The keyword arguments of `fn`.

    Returns:
      An `Explanation`; print it for a table. It has a row for each kind of equation for which there
      is a rewrite, with the rewrite or the reason to keep the equation. A note says why nothing is
      rewritten: `fn` cannot be traced, a rewrite failed, or rewrites are off for this backend.

    Raises:
      ValueError: As for `optimize`.
      TypeError: `fn` does not accept these arguments.

    Examples:
      >>> import jax, jax.numpy as jnp
      >>> def fn(image, kernel):
      ...     return jax.lax.conv(image, kernel, (1, 1), "SAME")
      >>> explanation = explain_rewrites(fn, jnp.ones((2, 3, 8, 8)), jnp.ones((5, 3, 3, 3)))
      >>> row = explanation.rows[0]
      >>> row.rule, row.count
      ('canonical_conv', 1)
      >>> row.shapes
      'float32[2, 3, 8, 8] float32[5, 3, 3, 3] -> float32[2, 5, 8, 8]'
    """
    platform = platform_of((args, kwargs))
    chosen = _optimize.resolve_mode(rewrites, platform)
    _check_arguments(fn, args, kwargs)
    if args:
        args = traits_of(fn).wrap_state(args[0]), *args[1:]
    try:
        # A step, such as that of a population, may be another program on each platform.
        with tracing_guards(), compiling_for(platform):
            closed, _ = _optimize.trace(fn, *args, **kwargs)
    except Untraceable as error:
        return Explanation((), 0, f"The function runs unchanged: {error}")
    if chosen == "off":
        note = f"The function runs unchanged: rewrites are off (platform: {platform})."
        return _explanation(closed, platform, lambda eqn, _: _keep(eqn, "rewrites are off"), note)
    if platform != "cpu":
        closed = inline_calls(closed)
    failures = _optimize.rewrite_or_keep(closed, chosen, platform)[1]
    note = "\n".join(map("A rewrite failed and is not used: {}".format, failures))
    failed = [getattr(failure, "rewrite", None) for failure in failures]
    # A failure that is not due to a certain rewrite turns off all of them.
    usable = [] if None in failed else _optimize.rules_for(platform)
    rules = [rule for rule in usable if rule not in failed]
    jaxprs_apart = {
        id(jaxpr)
        for eqn, *_ in walk_equations(closed)
        if is_apart(eqn)
        for body in core.jaxprs_in_params(eqn.params)
        for _, jaxpr, _ in walk_equations(body)
    }

    @functools.cache
    def inexact(jaxpr: core.Jaxpr) -> set[Any]:
        return find_inexact(jaxpr, is_apart=id(jaxpr) in jaxprs_apart)

    def verdict(eqn: core.JaxprEqn, jaxpr: core.Jaxpr) -> tuple[str, str]:
        """Returns the name and reason of the rule, or "" and the reason to keep the equation."""
        selected = select_rewrite(rules, eqn, jaxpr)
        if selected is None:
            return _keep(eqn, "no rewrite is known to be faster here")
        rule, _ = selected
        if chosen == "auto":
            return rule.name, rule.reason
        exact = select_rewrite(rules, eqn, jaxpr, exact_only=True)
        if exact and not inexact(jaxpr).intersection(eqn.outvars):
            return exact[0].name, exact[0].reason
        return "", f'{rule.name} changes last bits; rewrites="auto" uses it'

    return _explanation(closed, platform, verdict, note)


def _check_arguments(fn: Callable[..., Any], args: Any, kwargs: Any) -> None:
    """Raises TypeError unless the function takes these arguments."""
    try:
        signature = inspect.signature(fn)
    except (TypeError, ValueError):
        # It has no signature, or is not callable: tracing raises an error for the latter.
        return
    try:
        signature.bind(*args, **kwargs)
    except TypeError as error:
        raise TypeError(
            "explain_rewrites: expected the arguments of fn after it, explain_rewrites(fn, *args) "
            f"with fn{signature}, got others: {error}. A step takes (state, batch); "
            "train_step(loss_fn, tx) makes a step from a loss."
        ) from None


def _explanation(
    closed: Any,
    platform: str,
    verdict: Callable[[core.JaxprEqn, core.Jaxpr], tuple[str, str]],
    note: str,
) -> Explanation:
    """Groups equal equations into rows; `verdict` returns the rule and the reason for each."""
    primitives_with_rules = {rule.primitive for rule in _optimize.REWRITES}
    groups: dict[tuple[str, ...], list[core.JaxprEqn]] = {}
    others = 0
    for eqn, jaxpr, obstacle in _all_equations(closed):
        rule, reason = _keep(eqn, obstacle) if obstacle else verdict(eqn, jaxpr)
        if eqn.primitive not in primitives_with_rules or not (rule or reason):
            others += 1
            continue
        groups.setdefault((eqn.primitive.name, describe_types(eqn), rule, reason), []).append(eqn)
    rows = [
        Row(name, shapes, len(eqns), rule, reason, describe_location(eqns[0]))
        for (name, shapes, rule, reason), eqns in groups.items()
    ]
    return Explanation(tuple(rows), others, note)


def _keep(eqn: core.JaxprEqn, reason: str) -> tuple[str, str]:
    """Returns no rule, and the reason to keep an equation, which is "" for common ones."""
    return "", "" if eqn.primitive in _COMMON else reason


def _all_equations(jaxpr: Any) -> Iterator[tuple[core.JaxprEqn, core.Jaxpr, str]]:
    """Yields each equation, its jaxpr, and the reason that no rewrite may reach it, or ""."""
    for eqn, parent, _ in walk_equations(jaxpr):
        yield eqn, parent, ""
        if not is_entered(eqn):
            obstacle = f"inside {eqn.primitive.name}, which no rewrite may enter"
            for body in core.jaxprs_in_params(eqn.params):
                for inner_eqn, inner_jaxpr, _ in _all_equations(body):
                    yield inner_eqn, inner_jaxpr, obstacle
