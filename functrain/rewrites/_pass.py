"""The pass that applies rewrites to a jaxpr."""

import contextlib
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend import core
from jax.extend.core import primitives

from functrain.rewrites._equations import is_apart, is_entered, substitute
from functrain.rewrites._rewrite import (
    Rewrite,
    rewrite_scope,
    select_rewrite,
)
from functrain.rewrites._rounding import find_inexact, is_float32_conversion

# The calls that may be inlined, and the parameter that holds the called jaxpr.
_INLINED = {
    primitives.jit_p: "jaxpr",
    primitives.custom_jvp_call_p: "call_jaxpr",
    primitives.custom_vjp_call_p: "call_jaxpr",
}


# Operations on two arrays, one of which may have axes of length one where the other has not.
_BROADCASTING = frozenset(
    (
        *("add", "add_any", "div", "eq", "ge", "gt", "le", "lt", "max", "min", "mul", "ne"),
        *("pow", "rem", "sub"),
    )
)


def rewrite_jaxpr(jaxpr: Any, rewrites: Sequence[Rewrite], exact_only: bool = False) -> Any:
    """Returns a jaxpr in which rewrites have replaced the equations that they apply to.

    The jaxprs inside it are rewritten too: those of jit, scan, while, cond, remat, custom
    derivatives and shard_map. Equations of other primitives that contain jaxprs are kept. The new
    equations get the name stack, source line and context of the equation they replace.

    Args:
      jaxpr: A `jax.extend.core.Jaxpr` or `ClosedJaxpr`.
      rewrites: The first that applies is used. Later ones also see the equations it returns.
      exact_only: Whether to keep every equation whose replacement might change a bit.

    Returns:
      A jaxpr of the same kind and types, or the same object if nothing applies.

    Raises:
      RewriteError: A rewrite raised, or returned outputs of other types.

    Examples:
      >>> import jax
      >>> from jax import lax
      >>> from jax.extend.core import primitives
      >>> def replace(x, **params):
      ...     return lax.add(x, x)
      >>> rule = Rewrite("twice", primitives.sin_p, lambda eqn: True, replace)
      >>> rewrite_jaxpr(jax.make_jaxpr(lambda x: lax.exp(lax.sin(x)))(1.0), [rule])
      { lambda ; a:f32[]. let b:f32[] = add a a; c:f32[] = exp b in (c,) }
    """
    return _Pass(rewrites, exact_only).rewrite(jaxpr)


def inline_calls(jaxpr: Any) -> Any:
    """Returns a jaxpr without calls of jitted functions, so that rules see across their borders.

    Arrays are broadcast by equations of their own, not by additions and the like. The equations of
    such a function get the name stack and source line of the call. XLA inlines these calls too, so
    the compiled program is the same. Calls whose inputs or outputs have shardings are kept.

    Examples:
      >>> import jax
      >>> inline_calls(jax.make_jaxpr(jax.jit(jax.lax.sin))(1.0))
      { lambda ; a:f32[]. let b:f32[] = sin a in (b,) }
    """
    return _Inliner([], exact_only=False).rewrite(jaxpr)


class _Pass:
    """One pass over a jaxpr and the jaxprs inside it."""

    def __init__(self, rewrites: Sequence[Rewrite], exact_only: bool) -> None:
        self._rewrites = rewrites
        self._exact_only = exact_only
        # Whether the jaxpr that is being rewritten is in a loop or branch of the function.
        self._is_apart = False
        # A jaxpr that occurs twice is rewritten once and stays one object, so that jax lowers it
        # once, too. The old jaxpr is stored with the new one: as long as it lives, no other object
        # gets its id.
        self._rewritten: dict[tuple[int, bool], tuple[Any, Any]] = {}
        # The last equation of a replacement by its output, if it is a transpose.
        self._final_transposes: dict[Any, core.JaxprEqn] = {}
        self._replacements: dict[Any, Callable[..., list[Any]]] = {}

    def rewrite(self, jaxpr: Any) -> Any:
        """Returns the rewritten jaxpr, or the same object if nothing applies."""
        key = id(jaxpr), self._is_apart
        if key not in self._rewritten:
            self._rewritten[key] = jaxpr, self._rewrite_equations(jaxpr)
        return self._rewritten[key][1]

    def _rewrite_equations(self, jaxpr: Any) -> Any:
        # Before jax 0.12 a ClosedJaxpr is a class of its own; since then the two are one class.
        if not isinstance(jaxpr, core.Jaxpr):
            inner = self.rewrite(jaxpr.jaxpr)
            return jaxpr if inner is jaxpr.jaxpr else jaxpr.replace(jaxpr=inner)
        inexact = find_inexact(jaxpr, is_apart=self._is_apart) if self._exact_only else set()
        # Maps the outputs of replaced equations to those of their replacements.
        substitutions: dict[Any, Any] = {}
        eqns: list[core.JaxprEqn] = []
        for eqn in jaxpr.eqns:
            new = eqn
            if substitutions:
                new = eqn.replace(invars=substitute(substitutions, eqn.invars))
            if inexact.intersection(eqn.outvars):
                eqns.append(new)
            else:
                eqns += self._rewrite_equation(new, jaxpr, substitutions)
        if not substitutions and _are_same(eqns, jaxpr.eqns):
            return jaxpr
        outvars = substitute(substitutions, jaxpr.outvars)
        return jaxpr.replace(eqns=eqns, outvars=outvars, debug_info=jaxpr.debug_info)

    def _rewrite_equation(
        self, eqn: core.JaxprEqn, jaxpr: core.Jaxpr, substitutions: dict[Any, Any]
    ) -> list[core.JaxprEqn]:
        """Returns the equations that replace one, and records its outputs' substitutions."""
        if selected := select_rewrite(self._rewrites, eqn, jaxpr, self._exact_only):
            rewrite, replacement = selected
            with rewrite_scope(rewrite, eqn):
                if replacement:
                    inputs = substitute(substitutions, replacement.inputs)
                    with _context(eqn):
                        closed = _trace_replacement(replacement.fn, eqn, inputs)
                    eqns, outs = inline(core.jaxpr_as_fun(closed), eqn, inputs)
                else:
                    eqns, outs = self._apply(rewrite, eqn)
            if eqns and eqns[-1].primitive is primitives.transpose_p:
                self._final_transposes[eqns[-1].outvars[0]] = eqns[-1]
        elif is_float32_conversion(eqn) and eqn.invars[0] in self._final_transposes:
            # Convert before the transpose, or XLA would round the convolution: see _rounding.
            transpose = self._final_transposes[eqn.invars[0]]
            eqns, outs = inline(_convert_then_transpose(transpose, eqn), eqn, transpose.invars)
        elif is_entered(eqn):
            was_apart, self._is_apart = self._is_apart, self._is_apart or is_apart(eqn)
            params = _call_inside(eqn, lambda: self._rewrite_params(eqn.params))
            self._is_apart = was_apart
            is_same = all(params[name] is value for name, value in eqn.params.items())
            return [eqn if is_same else eqn.replace(params=params)]
        else:
            return [eqn]
        substitutions.update(zip(eqn.outvars, outs, strict=True))
        return eqns

    def _apply(self, rewrite: Rewrite, eqn: core.JaxprEqn) -> tuple[list[Any], list[Any]]:
        # Tracing a replacement again takes less time than making it, so layers of the same shape
        # share one.
        avals = tuple(var.aval for var in (*eqn.invars, *eqn.outvars))
        key = rewrite.name, avals, eqn.ctx, tuple(eqn.params.items())
        with _context(eqn):
            if key not in self._replacements:
                later = self._rewrites[self._rewrites.index(rewrite) + 1 :]
                self._replacements[key] = _make_replacement(rewrite, eqn, later, self._exact_only)
        return inline(self._replacements[key], eqn, eqn.invars)

    def _rewrite_params(self, params: dict[str, Any]) -> dict[str, Any]:
        return dict(zip(params, map(self._rewrite_param, params.values()), strict=True))

    def _rewrite_param(self, value: Any) -> Any:
        if isinstance(value, core.Jaxpr | core.ClosedJaxpr):
            return self.rewrite(value)
        # The branches of a `cond` are a tuple of jaxprs.
        if type(value) in (tuple, list):
            items = list(map(self._rewrite_param, value))
            return value if _are_same(items, value) else type(value)(items)
        return value


class _Inliner(_Pass):
    """The pass of `inline_calls`."""

    def _rewrite_equation(
        self, eqn: core.JaxprEqn, jaxpr: core.Jaxpr, substitutions: dict[Any, Any]
    ) -> list[core.JaxprEqn]:
        if eqn.primitive in _INLINED and not _has_shardings(eqn.params):
            called = self.rewrite(eqn.params[_INLINED[eqn.primitive]])
            eqns, outs = inline(core.jaxpr_as_fun(called), eqn, eqn.invars)
        elif eqn.primitive.name in _BROADCASTING:
            eqns, outs = inline(functools.partial(_broadcast_apart, eqn), eqn, eqn.invars)
        else:
            return super()._rewrite_equation(eqn, jaxpr, substitutions)
        substitutions.update(zip(eqn.outvars, outs, strict=True))
        return eqns


def _has_shardings(params: dict[str, Any]) -> bool:
    """Returns True if a call specifies the sharding of an input or output."""
    shardings = (*params.get("in_shardings", ()), *params.get("out_shardings", ()))
    return any(isinstance(sharding, jax.sharding.Sharding) for sharding in shardings)


def _broadcast_apart(eqn: core.JaxprEqn, *inputs: jax.Array) -> list[jax.Array]:
    result: Any = eqn.outvars[0].aval
    # Scalars stay, since they are broadcast by every operation.
    arrays = [x if x.ndim == 0 else jnp.broadcast_to(x, result.shape) for x in inputs]
    return [eqn.primitive.bind(*arrays, **eqn.params)]


def _are_same(new: Sequence[Any], old: Sequence[Any]) -> bool:
    """Returns True if both hold the same objects."""
    return all(a is b for a, b in zip(new, old, strict=True))


def _call_inside(eqn: core.JaxprEqn, work: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """Returns ``work()``, called in a context in which the body of the equation can be traced.

    Inside shard_map, a type contains the mesh axes over which the value varies. Such types exist
    only while a shard_map is traced, so this traces one around the call.
    """
    if eqn.primitive.name != "shard_map":
        return work()
    result: dict[str, Any] = {}

    def body(*_: Any) -> tuple[()]:
        result.update(work())
        return ()

    options = {name: eqn.params[name] for name in ("mesh", "in_specs", "check_vma")}
    # The parameter is named newly_manual_axes from jax 0.10.2 on.
    name = "newly_manual_axes" if "newly_manual_axes" in eqn.params else "manual_axes"
    options["axis_names"] = eqn.params[name]
    with _context(eqn):
        jax.make_jaxpr(jax.shard_map(body, out_specs=(), **options))(*(v.aval for v in eqn.invars))
    return result


def retype(x: Any, aval: Any) -> Any:
    """Returns the array with the dtype and the weak type of an abstract value."""
    if jax.typeof(x).dtype == aval.dtype and jax.typeof(x).weak_type == aval.weak_type:
        return x
    # `lax.convert_element_type` cannot make a weak type; its primitive can.
    return primitives.convert_element_type_p.bind(
        x, new_dtype=aval.dtype, weak_type=aval.weak_type, sharding=None
    )


def _make_replacement(
    rewrite: Rewrite, eqn: core.JaxprEqn, later: Sequence[Rewrite], exact_only: bool
) -> Callable[..., list[Any]]:
    """Returns a function that computes an equation as the rewrite and the later ones want it."""
    assert rewrite.replace is not None
    fn = functools.partial(rewrite.replace, **eqn.params)
    closed = _trace_replacement(fn, eqn, eqn.invars)
    run: Callable[..., list[Any]] = core.jaxpr_as_fun(rewrite_jaxpr(closed, later, exact_only))
    return run


def _trace_replacement(fn: Callable[..., Any], eqn: core.JaxprEqn, inputs: Sequence[Any]) -> Any:
    """Returns the jaxpr of a function that replaces an equation.

    Raises:
      TypeError: It captures arrays, or its outputs are not those of the equation.
    """
    avals = [var.aval for var in eqn.outvars]

    def replace(*inputs: Any) -> list[Any]:
        outs = fn(*inputs)
        outs = outs if eqn.primitive.multiple_results else [outs]
        return [retype(out, aval) for out, aval in zip(outs, avals, strict=True)]

    closed: Any = jax.make_jaxpr(replace)(*(var.aval for var in inputs))
    # A captured array would become a constant of the user's program.
    if closed.consts:
        raise TypeError("expected a rewrite that captures no arrays, got one that does")
    if [out.str_short() for out in closed.out_avals] != [aval.str_short() for aval in avals]:
        raise TypeError(f"expected outputs {avals}, got {closed.out_avals}")
    return closed


def _convert_then_transpose(
    transpose: core.JaxprEqn, conversion: core.JaxprEqn
) -> Callable[..., Any]:
    aval, axes = conversion.outvars[0].aval, transpose.params["permutation"]
    return lambda x: [lax.transpose(retype(x, aval), axes)]


def inline(
    fn: Callable[..., list[Any]], eqn: core.JaxprEqn, inputs: Sequence[Any]
) -> tuple[list[Any], list[Any]]:
    """Returns the equations and outputs of a function applied to variables of a jaxpr.

    The equations get the name stack, source line and context of `eqn`.
    """
    with _context(eqn):
        # The lambda makes a new function for each call. For a function that it has traced before,
        # jax would return the same variables again.
        jaxpr = jax.make_jaxpr(lambda *xs: fn(*xs))(*(atom.aval for atom in inputs)).jaxpr
    substitutions = dict(zip(jaxpr.invars, inputs, strict=True))
    eqns = []
    for new in jaxpr.eqns:
        invars = substitute(substitutions, new.invars)
        eqns.append(new.replace(invars=invars, source_info=eqn.source_info, ctx=eqn.ctx))
    return eqns, substitute(substitutions, jaxpr.outvars)


def _context(eqn: core.JaxprEqn) -> contextlib.AbstractContextManager[Any]:
    """Returns the jax settings that the equation was traced under, such as the mesh."""
    manager: contextlib.AbstractContextManager[Any] = eqn.ctx.manager
    return manager
