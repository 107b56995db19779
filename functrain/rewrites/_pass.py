"""The pass that applies rewrites to a jaxpr."""

import functools
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend import core
from jax.extend.core import JaxprEqn, primitives

from functrain.rewrites._equations import avals, is_apart, is_entered, substitute
from functrain.rewrites._rewrite import Rewrite, rewrite_scope, select_rewrite
from functrain.rewrites._rounding import find_inexact, is_float32_conversion

# The calls that may be inlined, and the parameter that holds the called jaxpr.
_INLINED = {
    primitives.jit_p: "jaxpr",
    primitives.custom_jvp_call_p: "call_jaxpr",
    primitives.custom_vjp_call_p: "call_jaxpr",
}


# Operations on two arrays, one of which may have axes of length one where the other has not.
_BROADCASTING = {
    *("add", "add_any", "div", "eq", "ge", "gt", "le", "lt", "max", "min", "mul", "ne"),
    *("pow", "rem", "sub"),
}

# The equations that replace one, and its new outputs; None to keep it.
_Replaced: TypeAlias = tuple[list[JaxprEqn], list[Any]] | None


def rewrite_jaxpr(jaxpr: Any, rewrites: Sequence[Rewrite], exact_only: bool = False) -> Any:
    """Returns a jaxpr in which rewrites have replaced the equations that they apply to.

    The jaxprs inside it are rewritten too: those of jit, scan, while, cond, remat, custom
    derivatives and shard_map. Equations of other primitives that contain jaxprs are kept. The new
    equations get the name stack, source line and context of the equation they replace.

    Args:
      jaxpr: A `jax.extend.core.Jaxpr` or `ClosedJaxpr`.
      rewrites: The first that applies is used. Later ones also see the equations it returns.
      exact_only: True keeps every equation whose replacement might change a bit.

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
        # The last equation of a replacement by the id of its output, if it is a transpose.
        self._final_transposes: dict[int, JaxprEqn] = {}
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
        eqns: list[JaxprEqn] = []
        for eqn in jaxpr.eqns:
            new = eqn
            if substitutions:
                new = eqn.replace(invars=substitute(substitutions, eqn.invars))
            replaced = None
            if not inexact.intersection(eqn.outvars):
                replaced = self._replace(eqn, new, jaxpr, substitutions)
            if replaced is None:
                eqns.append(self._rewrite_inside(new))
            else:
                eqns += replaced[0]
                substitutions.update(zip(eqn.outvars, replaced[1], strict=True))
        if not substitutions and _are_same(eqns, jaxpr.eqns):
            return jaxpr
        outvars = substitute(substitutions, jaxpr.outvars)
        return jaxpr.replace(eqns=eqns, outvars=outvars, debug_info=jaxpr.debug_info)

    def _replace(
        self, eqn: JaxprEqn, new: JaxprEqn, jaxpr: core.Jaxpr, substitutions: dict[Any, Any]
    ) -> _Replaced:
        """Returns what replaces an equation.

        Args:
          eqn: The equation of the jaxpr.
          new: The equation, with the inputs that it has now.
          jaxpr: The jaxpr.
          substitutions: The new variables by the variables of the jaxpr that they replace.
        """
        selected = select_rewrite(self._rewrites, eqn, jaxpr, self._exact_only)
        if selected is None:
            transpose = self._final_transposes.get(id(new.invars[0])) if new.invars else None
            if transpose is None or not is_float32_conversion(new):
                return None
            # Convert before the transpose, or XLA would round the convolution: see _rounding.
            return inline(_convert_then_transpose(transpose, new), new, transpose.invars)
        rewrite, replacement = selected
        inputs = substitute(substitutions, replacement.inputs)
        with rewrite_scope(rewrite, eqn):
            eqns, outs = inline(self._trace(rewrite, replacement.fn, new, inputs), new, inputs)
        if eqns and eqns[-1].primitive is primitives.transpose_p:
            self._final_transposes[id(eqns[-1].outvars[0])] = eqns[-1]
        return eqns, outs

    def _trace(
        self, rewrite: Rewrite, fn: Callable[..., Any], eqn: JaxprEqn, inputs: Sequence[Any]
    ) -> Callable[..., list[Any]]:
        """Returns what replaces an equation, after the rewrites behind this one have seen it."""
        # Tracing a replacement again takes less time than making it, so layers of the same shape
        # share one.
        key = rewrite.name, tuple(avals(eqn)), eqn.ctx, tuple(eqn.params.items())
        if rewrite.replace and key in self._replacements:
            return self._replacements[key]
        later = self._rewrites[self._rewrites.index(rewrite) + 1 :]
        # The jax settings that the equation was traced under, such as the mesh.
        with eqn.ctx.manager:
            closed = rewrite_jaxpr(_trace_replacement(fn, eqn, inputs), later, self._exact_only)
        run: Callable[..., list[Any]] = core.jaxpr_as_fun(closed)
        self._replacements[key] = run
        return run

    def _rewrite_inside(self, eqn: JaxprEqn) -> JaxprEqn:
        """Returns the equation with the jaxprs inside it rewritten, or the same one."""
        if not is_entered(eqn):
            return eqn
        leaves, structure = jax.tree.flatten(eqn.params)

        def rewrite_leaves() -> list[Any]:
            kinds = core.Jaxpr | core.ClosedJaxpr
            return [self.rewrite(x) if isinstance(x, kinds) else x for x in leaves]

        was_apart, self._is_apart = self._is_apart, self._is_apart or is_apart(eqn)
        new_leaves = _call_inside(eqn, rewrite_leaves)
        self._is_apart = was_apart
        if _are_same(new_leaves, leaves):
            return eqn
        new: JaxprEqn = eqn.replace(params=jax.tree.unflatten(structure, new_leaves))
        return new


class _Inliner(_Pass):
    """The pass of `inline_calls`."""

    def _replace(
        self, eqn: JaxprEqn, new: JaxprEqn, jaxpr: core.Jaxpr, substitutions: dict[Any, Any]
    ) -> _Replaced:
        if eqn.primitive in _INLINED and not _has_shardings(eqn.params):
            called = self.rewrite(eqn.params[_INLINED[eqn.primitive]])
            return inline(core.jaxpr_as_fun(called), new, new.invars)
        if eqn.primitive.name in _BROADCASTING:
            return inline(functools.partial(_broadcast_apart, eqn), new, new.invars)
        return None


def _has_shardings(params: dict[str, Any]) -> bool:
    """Returns True if a call specifies the sharding of an input or output."""
    shardings = (*params.get("in_shardings", ()), *params.get("out_shardings", ()))
    return any(isinstance(sharding, jax.sharding.Sharding) for sharding in shardings)


def _broadcast_apart(eqn: JaxprEqn, *inputs: jax.Array) -> list[jax.Array]:
    result: Any = eqn.outvars[0].aval
    # Scalars stay, since they are broadcast by every operation.
    arrays = [x if x.ndim == 0 else jnp.broadcast_to(x, result.shape) for x in inputs]
    return [eqn.primitive.bind(*arrays, **eqn.params)]


def _are_same(new: Sequence[Any], old: Sequence[Any]) -> bool:
    """Returns True if both hold the same objects."""
    return all(a is b for a, b in zip(new, old, strict=True))


def _call_inside(eqn: JaxprEqn, work: Callable[[], list[Any]]) -> list[Any]:
    """Returns ``work()``, called in a context in which the body of the equation can be traced.

    Inside shard_map, a type contains the mesh axes over which the value varies. Such types exist
    only while a shard_map is traced, so this traces one around the call.
    """
    if eqn.primitive.name != "shard_map":
        return work()
    result: list[Any] = []

    def body(*_: Any) -> tuple[()]:
        result.extend(work())
        return ()

    options = {name: eqn.params[name] for name in ("mesh", "in_specs", "check_vma")}
    # The parameter is named newly_manual_axes from jax 0.10.2 on.
    name = "newly_manual_axes" if "newly_manual_axes" in eqn.params else "manual_axes"
    options["axis_names"] = eqn.params[name]
    with eqn.ctx.manager:
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


def _trace_replacement(fn: Callable[..., Any], eqn: JaxprEqn, inputs: Sequence[Any]) -> Any:
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


def _convert_then_transpose(transpose: JaxprEqn, conversion: JaxprEqn) -> Callable[..., Any]:
    aval, axes = conversion.outvars[0].aval, transpose.params["permutation"]
    return lambda x: [lax.transpose(retype(x, aval), axes)]


def inline(
    fn: Callable[..., list[Any]], eqn: JaxprEqn, inputs: Sequence[Any]
) -> tuple[list[Any], list[Any]]:
    """Returns the equations and outputs of a function applied to variables of a jaxpr.

    The equations get the name stack, source line and context of `eqn`.
    """
    with eqn.ctx.manager:
        # The lambda makes a new function for each call. For a function that it has traced before,
        # jax would return the same variables again.
        jaxpr = jax.make_jaxpr(lambda *xs: fn(*xs))(*(atom.aval for atom in inputs)).jaxpr
    substitutions = dict(zip(jaxpr.invars, inputs, strict=True))
    eqns = []
    for new in jaxpr.eqns:
        invars = substitute(substitutions, new.invars)
        eqns.append(new.replace(invars=invars, source_info=eqn.source_info, ctx=eqn.ctx))
    return eqns, substitute(substitutions, jaxpr.outvars)
