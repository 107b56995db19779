"""A table of the operations of a function that are rewritten, with reasons."""

import dataclasses
import textwrap
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
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
    open_jaxpr,
)
from functrain.rewrites._optimize import Mode
from functrain.rewrites._pass import inline_calls
from functrain.rewrites._rewrite import Rewrite, select_rewrite
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
    """The result of `explain_rewrites`; prints as text of at most 80 columns.

    Attributes:
      rows: The equations for which there is a rewrite, in the order of the program; common ones,
        such as products, sums, broadcasts and scans, only if a rewrite replaces them.
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
        remainder = f"{self.others} equation{'' if self.others == 1 else 's'} without a rewrite."
        if not self.rows:
            return _wrap(f"{self.note or 'Nothing to rewrite.'} {remainder if self.others else ''}")
        lines = [_wrap(line) for line in self.note.splitlines()]
        for row in self.rows:
            lines += [
                f"{row.count} x {row.primitive}: {row.rule or 'not rewritten'}",
                _wrap(row.shapes, indent="    "),
                _wrap(row.reason, indent="    "),
                f"    {_repr.shorten_start(row.location, _WIDTH - 4)}",
            ]
        return "\n".join([*lines, f"And {remainder}"])


def _wrap(text: str, indent: str = "") -> str:
    """Breaks a text into lines, but not within a shape."""
    # textwrap does not break lines at a no-break space.
    text = text.replace(", ", ",\N{NO-BREAK SPACE}")
    lines = textwrap.fill(text, _WIDTH - len(indent), break_on_hyphens=False)
    return textwrap.indent(lines.replace("\N{NO-BREAK SPACE}", " "), indent)


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
      An `Explanation`; print it for a text. It has a row for each kind of equation for which there
      is a rewrite, with the rewrite or the reason to keep the equation. A note says why nothing is
      rewritten: a rewrite failed, or rewrites are off for this backend.

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
    if args:
        # A step with metrics carries their values beside the state.
        args = traits_of(fn).wrap_state(args[0]), *args[1:]
    # A step, such as that of a population, may be another program on each platform.
    with tracing_guards(), compiling_for(platform):
        closed = jax.make_jaxpr(fn)(*args, **kwargs)
    if chosen == "off":
        note = f"The function runs unchanged: rewrites are off (platform: {platform})."
        return _explain(_walk(closed, obstacle="rewrites are off"), (), note)
    if platform != "cpu":
        # As the pass does: on accelerators, rules see across the borders of calls.
        closed = inline_calls(closed)
    failures = _optimize.rewrite_or_keep(closed, chosen, platform)[1]
    note = "\n".join(map(_optimize.describe_failure, failures))
    failed = [getattr(failure, "rewrite", None) for failure in failures]
    # A failure that is not due to a certain rewrite turns off all of them.
    usable = [] if None in failed else _optimize.rules_for(platform)
    rules = [rule for rule in usable if rule not in failed]
    return _explain(_walk(closed), rules, note, is_exact=chosen == "exact")


class _Location(NamedTuple):
    """An equation, and what is around it.

    Attributes:
      eqn: The equation.
      jaxpr: The jaxpr that contains it.
      is_apart: True in a loop or a branch.
      obstacle: The reason that no rewrite may reach it, or "".
    """

    eqn: core.JaxprEqn
    jaxpr: Any
    is_apart: bool
    obstacle: str


def _walk(jaxpr: Any, is_apart_already: bool = False, obstacle: str = "") -> Iterator[_Location]:
    """Yields every equation of a jaxpr, and those inside of them."""
    for eqn in jaxpr.eqns:
        yield _Location(eqn, open_jaxpr(jaxpr), is_apart_already, obstacle)
        not_entered = f"inside {eqn.primitive.name}, which no rewrite may enter"
        inner_obstacle = obstacle or ("" if is_entered(eqn) else not_entered)
        for inner in core.jaxprs_in_params(eqn.params):
            yield from _walk(inner, is_apart_already or is_apart(eqn), inner_obstacle)


def _explain(
    locations: Iterable[_Location], rules: Sequence[Rewrite], note: str, *, is_exact: bool = False
) -> Explanation:
    """Groups equal equations into rows."""
    primitives_with_rules = {rule.primitive for rule in _optimize.REWRITES}
    groups: dict[tuple[str, ...], list[core.JaxprEqn]] = {}
    other_count = 0
    for location in locations:
        eqn = location.eqn
        rule, reason = _verdict(location, rules, is_exact=is_exact)
        is_listed = rule or eqn.primitive not in _COMMON
        if eqn.primitive in primitives_with_rules and is_listed:
            key = eqn.primitive.name, describe_types(eqn), rule, reason
            groups.setdefault(key, []).append(eqn)
        else:
            other_count += 1
    rows = [
        Row(name, shapes, len(eqns), rule, reason, describe_location(eqns[0]))
        for (name, shapes, rule, reason), eqns in groups.items()
    ]
    return Explanation(tuple(rows), other_count, note)


def _verdict(location: _Location, rules: Sequence[Rewrite], *, is_exact: bool) -> tuple[str, str]:
    """Returns the name and reason of the rule, or "" and the reason to keep the equation."""
    eqn, jaxpr, is_apart_already, obstacle = location
    if obstacle:
        return "", obstacle
    selected = select_rewrite(rules, eqn, jaxpr)
    if selected is None:
        return "", "no rewrite is known to be faster here"
    auto_rule = selected[0]
    if not is_exact:
        return auto_rule.name, auto_rule.reason
    exact = select_rewrite(rules, eqn, jaxpr, exact_only=True)
    if exact and not find_inexact(jaxpr, is_apart=is_apart_already).intersection(eqn.outvars):
        return exact[0].name, exact[0].reason
    return "", f'{auto_rule.name} changes last bits; rewrites="auto" uses it'
