"""The definition of a rewrite, and the choice of the one that applies to an equation."""

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
from jax import lax
from jax.extend import core

from functrain.rewrites._equations import describe_location, describe_types


class Rewrite(NamedTuple):
    """A rule that replaces equations of one primitive.

    Attributes:
      name: The name of the rule in warnings and in `explain_rewrites`.
      primitive: The primitive of the equations that it may replace.
      applies: ``(eqn) -> bool``. Decides from the equation's types and parameters.
      replace: ``(*inputs, **params) -> output``, or a sequence of outputs if the primitive has
        several. Plain `jax.lax` code; it may not capture arrays.
      reason: Why the replacement is faster, in a few words for `explain_rewrites`.
      is_exact: ``(eqn) -> bool``. Returns True if the replacement of this equation has the same
        bits when both run under `jax.jit`. By default no replacement is exact.
      replace_in_context: ``(eqn, jaxpr) -> Replacement or None``. Used in place of `replace`, by
        rules that need other variables than the inputs of the equation. None if the rule does not
        apply.
      platforms: The platforms that it is for: "cpu", "tpu".
    """

    name: str
    primitive: core.Primitive
    applies: Callable[[core.JaxprEqn], bool]
    replace: Callable[..., Any] | None = None
    reason: str = ""
    is_exact: Callable[[core.JaxprEqn], bool] = lambda eqn: False
    replace_in_context: Callable[[core.JaxprEqn, core.Jaxpr], "Replacement | None"] | None = None
    platforms: tuple[str, ...] = ("cpu",)


class Replacement(NamedTuple):
    """A function that replaces an equation, of variables that are computed before it.

    Attributes:
      fn: ``(*inputs) -> output``, plain `jax.lax` code, which captures no arrays.
      inputs: Variables or literals of the jaxpr.
    """

    fn: Callable[..., Any]
    inputs: Sequence[Any]


def rewrite(
    primitive: core.Primitive,
    applies: Callable[[core.JaxprEqn], bool],
    reason: str,
    *,
    in_context: bool = False,
    **options: Any,
) -> Callable[[Callable[..., Any]], Rewrite]:
    """Returns a decorator that makes a `Rewrite` from a function, with the function's name.

    Args:
      primitive: As for `Rewrite`.
      applies: As for `Rewrite`.
      reason: As for `Rewrite`.
      in_context: True for a function ``(eqn, jaxpr)``, `Rewrite.replace_in_context`.
      **options: The other attributes of a `Rewrite`.
    """

    def make(fn: Callable[..., Any]) -> Rewrite:
        made = Rewrite(fn.__name__, primitive, applies, fn, reason, **options)
        return made._replace(replace=None, replace_in_context=fn) if in_context else made

    return make


class RewriteError(Exception):
    """A rewrite failed; the message names it and the equation.

    Attributes:
      rewrite: The rewrite that failed.
    """

    def __init__(self, rewrite: Rewrite, eqn: core.JaxprEqn, error: Exception) -> None:
        self.rewrite = rewrite
        location = describe_location(eqn)
        super().__init__(f"{rewrite.name}: {error!r}, at {describe_types(eqn)} ({location}).")


def select_rewrite(
    rewrites: Sequence[Rewrite], eqn: core.JaxprEqn, jaxpr: core.Jaxpr, exact_only: bool = False
) -> tuple[Rewrite, Replacement] | None:
    """Returns the first rewrite that applies to an equation, and its replacement; None if none.

    Args:
      rewrites: The rewrites, in order of precedence.
      eqn: The equation.
      jaxpr: The jaxpr that contains the equation.
      exact_only: True skips rewrites that might change a bit of the result.

    Raises:
      RewriteError: A rewrite raised.
    """
    # The user asked for a certain algorithm, which the replacing operation may not have.
    if isinstance(eqn.params.get("precision"), lax.DotAlgorithm | lax.DotAlgorithmPreset):
        return None
    for rewrite in rewrites:
        if eqn.primitive is not rewrite.primitive:
            continue
        with rewrite_scope(rewrite, eqn):
            if not rewrite.applies(eqn) or (exact_only and not rewrite.is_exact(eqn)):
                continue
            if rewrite.replace:
                fn = functools.partial(rewrite.replace, **eqn.params)
                return rewrite, Replacement(fn, eqn.invars)
            assert rewrite.replace_in_context is not None
            if replacement := rewrite.replace_in_context(eqn, jaxpr):
                return rewrite, replacement
    return None


@contextlib.contextmanager
def rewrite_scope(rewrite: Rewrite, eqn: core.JaxprEqn) -> Iterator[None]:
    """Raises errors of a rewrite as RewriteError, and turns off the user's strict promotion."""
    try:
        with jax.numpy_rank_promotion("allow"), jax.numpy_dtype_promotion("standard"):
            yield
    except RewriteError:
        # A later rewrite failed on an equation that this one returned: the error names that one.
        raise
    except Exception as error:
        raise RewriteError(rewrite, eqn, error) from error
