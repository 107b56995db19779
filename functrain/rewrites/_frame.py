"""What a rewrite is, and the pass that applies some of them to a jaxpr."""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
from jax import lax
from jax.extend import core, source_info_util
from jax.extend.core import primitives

from functrain.rewrites._rounding import is_widening, perhaps_unrounded


class Rewrite(NamedTuple):
    """A rule that replaces equations of one primitive.

    Attributes:
      name: Names the rule in warnings.
      primitive: The primitive of the equations it looks at.
      applies: ``(eqn) -> bool``. Decides from the equation's types and parameters.
      replace: ``(*inputs, **params) -> output``, or a sequence of outputs where the primitive has
        several. Plain `jax.lax` code; it may not capture arrays.
      reason: Why it pays, in a few words for `explain`.
      exact: ``(eqn) -> bool``. Whether what replaces this equation keeps every bit, when both run
        under `jax.jit`. Of no equation, unless said.
      beside: A primitive that the function must have too, such as that of the gradient, where the
        rewrite does not pay without.
      within: ``(eqn, jaxpr) -> bool``. Decides, where `applies` has said yes, from the equations
        around it. The equation's outputs are those in the jaxpr; its inputs may be new ones.
    """

    name: str
    primitive: core.Primitive
    applies: Callable[[core.JaxprEqn], bool]
    replace: Callable[..., Any]
    reason: str = ""
    exact: Callable[[core.JaxprEqn], bool] = lambda eqn: False
    beside: core.Primitive | None = None
    within: Callable[[core.JaxprEqn, core.Jaxpr], bool] = lambda eqn, jaxpr: True


class RewriteError(Exception):
    """A rewrite failed; the message names it and the equation.

    Attributes:
      rewrite: The one that failed.
    """

    def __init__(self, rewrite: Rewrite, eqn: core.JaxprEqn, error: Exception) -> None:
        self.rewrite = rewrite
        super().__init__(f"{rewrite.name}: {error!r}, at {types(eqn)} ({place(eqn)}).")


# Those whose jaxprs are functions that are called, and may be replaced by equal ones. What another
# primitive does with its jaxprs nobody can know: those stay as they are.
_CALLS = {
    primitives.jit_p,
    primitives.call_p,
    primitives.closed_call_p,
    primitives.remat_p,
    primitives.scan_p,
    primitives.while_p,
    primitives.cond_p,
    primitives.custom_jvp_call_p,
    primitives.custom_vjp_call_p,
}


def is_entered(eqn: core.JaxprEqn) -> bool:
    """Whether the pass looks into the jaxprs of an equation."""
    return eqn.primitive in _CALLS or eqn.primitive.name == "shard_map"


def first_that_applies(
    rewrites: Sequence[Rewrite], eqn: core.JaxprEqn, jaxpr: core.Jaxpr, exact: bool = False
) -> Rewrite | None:
    """Returns the rewrite that an equation gets; if `exact`, of those that keep every bit of it.

    Args:
      rewrites: In the order they are asked.
      eqn: The equation.
      jaxpr: What it is an equation of.
      exact: Whether to leave out those that might change some bit.

    Raises:
      RewriteError: A rewrite raised.
    """
    if isinstance(eqn.params.get("precision"), lax.DotAlgorithm | lax.DotAlgorithmPreset):
        return None  # of this operation: another may not have it
    for rewrite in rewrites:
        if eqn.primitive is rewrite.primitive:
            with _named(rewrite, eqn):
                may = rewrite.applies(eqn) and (rewrite.exact(eqn) or not exact)
                if may and rewrite.within(eqn, jaxpr):
                    return rewrite
    return None


def that_pay_in(jaxpr: Any, rewrites: Sequence[Rewrite]) -> list[Rewrite]:
    """Returns the rewrites without those for which the jaxpr has not what they want beside."""
    found = {eqn.primitive for eqn, *_ in equations(jaxpr)}
    return [rewrite for rewrite in rewrites if rewrite.beside in (None, *found)]


def types(eqn: core.JaxprEqn) -> str:
    """Returns an equation's types, such as ``f32[8] -> f32[]``."""
    ins, outs = (
        " ".join(var.aval.str_short(short_dtypes=True) for var in side)
        for side in (eqn.invars, eqn.outvars)
    )
    return f"{ins} -> {outs}"


def place(eqn: core.JaxprEqn) -> str:
    """Returns the layer an equation came from, if it has a name, and its source line."""
    line = source_info_util.summarize(eqn.source_info).rpartition("/")[2]
    return "  ".join(filter(None, [str(eqn.source_info.name_stack), line]))


def equations(jaxpr: Any, times: int = 1) -> Iterator[tuple[core.JaxprEqn, core.Jaxpr, int]]:
    """Yields what the pass looks at, the jaxpr it stands in, and how often a run evaluates it.

    A loop counts as often as it is known to go round, and once where it is not; of a `cond` every
    branch counts.
    """
    for eqn in jaxpr.eqns:
        yield eqn, getattr(jaxpr, "jaxpr", jaxpr), times
        if is_entered(eqn):
            often = times * eqn.params["length"] if eqn.primitive is primitives.scan_p else times
            for inner in core.jaxprs_in_params(eqn.params):
                yield from equations(inner, often)


@contextlib.contextmanager
def _named(rewrite: Rewrite, eqn: core.JaxprEqn) -> Iterator[None]:
    """Names the rewrite in errors, and spares it how strict the user wants jax to be."""
    try:
        with jax.numpy_rank_promotion("allow"), jax.numpy_dtype_promotion("standard"):
            yield
    except RewriteError:  # of a later rewrite, about what this one returned
        raise
    except Exception as error:
        raise RewriteError(rewrite, eqn, error) from error


def rewrite_jaxpr(jaxpr: Any, rewrites: Sequence[Rewrite], exact: bool = False) -> Any:
    """Returns a jaxpr with every equation replaced that one of the rewrites applies to.

    The jaxprs inside it are entered: those of jit, scan, while, cond, remat, custom derivatives and
    shard_map. An equation of another primitive stays whole. What replaces an equation has its
    names, source lines and context.

    Args:
      jaxpr: A `jax.extend.core.Jaxpr` or `ClosedJaxpr`.
      rewrites: The first that applies is taken. What it returns is looked at by those after it.
      exact: Whether to leave every equation of which a rewrite might change some bit.

    Returns:
      A jaxpr of the same kind and types, or the object itself where nothing applies.

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
    return _Pass(that_pay_in(jaxpr, rewrites), exact).jaxpr(jaxpr)


class _Pass:
    """One run over a jaxpr and all inside it."""

    def __init__(self, rewrites: Sequence[Rewrite], exact: bool) -> None:
        self._rewrites = rewrites
        self._exact = exact
        # A jaxpr met twice is rewritten once, and stays one object: jax lowers it once, too.
        # The old one is kept so that its id stays its own.
        self._done: dict[int, tuple[Any, Any]] = {}
        self._turned: dict[Any, core.JaxprEqn] = {}  # results -> the transposes they end in
        self._replacements: dict[Any, Callable[..., list[Any]]] = {}

    def jaxpr(self, jaxpr: Any) -> Any:
        if id(jaxpr) not in self._done:
            self._done[id(jaxpr)] = jaxpr, self._jaxpr(jaxpr)
        return self._done[id(jaxpr)][1]

    def _jaxpr(self, jaxpr: Any) -> Any:
        if not isinstance(jaxpr, core.Jaxpr):  # closed; since jax 0.12 the two are one class
            inner = self.jaxpr(jaxpr.jaxpr)
            return jaxpr if inner is jaxpr.jaxpr else jaxpr.replace(jaxpr=inner)
        left = perhaps_unrounded(jaxpr) if self._exact else ()
        env: dict[Any, Any] = {}  # outputs of replaced equations -> what stands for them
        eqns: list[core.JaxprEqn] = []
        for eqn in jaxpr.eqns:
            new = eqn.replace(invars=read(env, eqn.invars)) if env else eqn
            is_left = any(out in left for out in eqn.outvars)
            eqns += [new] if is_left else self._eqn(new, jaxpr, env)
        if not env and all(new is old for new, old in zip(eqns, jaxpr.eqns, strict=True)):
            return jaxpr
        outvars = read(env, jaxpr.outvars)
        return jaxpr.replace(eqns=eqns, outvars=outvars, debug_info=jaxpr.debug_info)

    def _eqn(
        self, eqn: core.JaxprEqn, jaxpr: core.Jaxpr, env: dict[Any, Any]
    ) -> list[core.JaxprEqn]:
        if rewrite := first_that_applies(self._rewrites, eqn, jaxpr, self._exact):
            with _named(rewrite, eqn):
                eqns, outs = self._replaced(rewrite, eqn)
            if eqns and eqns[-1].primitive is primitives.transpose_p:
                self._turned[eqns[-1].outvars[0]] = eqns[-1]
        elif is_widening(eqn) and (turn := self._turned.get(eqn.invars[0])):  # see _rounding
            eqns, outs = inlined(_converted_first(turn, eqn), eqn, turn.invars)
        elif is_entered(eqn):
            params = _inside(eqn, lambda: {k: self._param(v) for k, v in eqn.params.items()})
            same = all(params[name] is value for name, value in eqn.params.items())
            return [eqn if same else eqn.replace(params=params)]
        else:
            return [eqn]
        env.update(zip(eqn.outvars, outs, strict=True))
        return eqns

    def _replaced(self, rewrite: Rewrite, eqn: core.JaxprEqn) -> tuple[list[Any], list[Any]]:
        avals = tuple(var.aval for var in (*eqn.invars, *eqn.outvars))
        alike = rewrite.name, avals, eqn.ctx, tuple(eqn.params.items())
        with _context(eqn):
            if alike not in self._replacements:
                later = self._rewrites[self._rewrites.index(rewrite) + 1 :]
                self._replacements[alike] = _replacement(rewrite, eqn, later, self._exact)
        return inlined(self._replacements[alike], eqn, eqn.invars)

    def _param(self, value: Any) -> Any:
        if isinstance(value, core.Jaxpr | core.ClosedJaxpr):
            return self.jaxpr(value)
        if type(value) in (tuple, list):
            new = [self._param(item) for item in value]
            changed = any(a is not b for a, b in zip(new, value, strict=True))
            return type(value)(new) if changed else value
        return value


def _inside(eqn: core.JaxprEqn, work: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """Calls `work` where the body of the equation may be traced.

    What varies over which mesh axis is part of a type inside shard_map only, so that is entered.
    """
    if eqn.primitive.name != "shard_map":
        return work()
    result: dict[str, Any] = {}

    def body(*_: Any) -> tuple[()]:
        result.update(work())
        return ()

    options = {name: eqn.params[name] for name in ("mesh", "in_specs", "check_vma")}
    old_name, new_name = "manual_axes", "newly_manual_axes"  # before and from jax 0.10.2 on
    options["axis_names"] = eqn.params[new_name if new_name in eqn.params else old_name]
    with _context(eqn):
        jax.make_jaxpr(jax.shard_map(body, out_specs=(), **options))(*(v.aval for v in eqn.invars))
    return result


def retype(x: Any, aval: Any) -> Any:
    """Returns the array with exactly the type of an abstract value: dtype and weakness."""
    if jax.typeof(x).dtype == aval.dtype and jax.typeof(x).weak_type == aval.weak_type:
        return x
    # `lax.convert_element_type` makes no weak type; its primitive does.
    return primitives.convert_element_type_p.bind(
        x, new_dtype=aval.dtype, weak_type=aval.weak_type, sharding=None
    )


def _replacement(
    rewrite: Rewrite, eqn: core.JaxprEqn, later: Sequence[Rewrite], exact: bool
) -> Callable[..., list[Any]]:
    """Returns what a rewrite makes of an equation, with later ones applied, as a function.

    Layers of one shape share it: to trace it once more takes less time than to make it.
    """
    avals = [var.aval for var in eqn.outvars]

    def replace(*inputs: Any) -> list[Any]:
        outs = rewrite.replace(*inputs, **eqn.params)
        outs = outs if eqn.primitive.multiple_results else [outs]
        return [retype(out, aval) for out, aval in zip(outs, avals, strict=True)]

    closed: Any = jax.make_jaxpr(replace)(*(var.aval for var in eqn.invars))
    if closed.consts:
        raise TypeError("expected a rewrite that captures no arrays, got one that does")
    if [out.str_short() for out in closed.out_avals] != [aval.str_short() for aval in avals]:
        raise TypeError(f"expected outputs {avals}, got {closed.out_avals}")
    run: Callable[..., list[Any]] = core.jaxpr_as_fun(rewrite_jaxpr(closed, later, exact))
    return run


def _converted_first(transpose: core.JaxprEqn, conversion: core.JaxprEqn) -> Callable[..., Any]:
    aval, axes = conversion.outvars[0].aval, transpose.params["permutation"]
    return lambda x: [lax.transpose(retype(x, aval), axes)]


def inlined(
    fn: Callable[..., list[Any]], eqn: core.JaxprEqn, inputs: Sequence[Any]
) -> tuple[list[Any], list[Any]]:
    """Returns the equations of a function, with another equation's name and place, and outputs."""
    with _context(eqn):
        # A function of its own: of one that it knows, jax would return the same variables.
        jaxpr = jax.make_jaxpr(lambda *xs: fn(*xs))(*(atom.aval for atom in inputs)).jaxpr
    env = dict(zip(jaxpr.invars, inputs, strict=True))
    eqns = [
        new.replace(invars=read(env, new.invars), source_info=eqn.source_info, ctx=eqn.ctx)
        for new in jaxpr.eqns
    ]
    return eqns, read(env, jaxpr.outvars)


def _context(eqn: core.JaxprEqn) -> contextlib.AbstractContextManager[Any]:
    """The mesh and the like that the equation was traced under."""
    manager: contextlib.AbstractContextManager[Any] = eqn.ctx.manager
    return manager


def readers(var: Any, jaxpr: core.Jaxpr) -> list[core.JaxprEqn]:
    """Returns the equations that read a variable."""
    return [eqn for eqn in jaxpr.eqns if any(atom is var for atom in eqn.invars)]


def read(env: dict[Any, Any], atoms: Sequence[Any]) -> list[Any]:
    return [atom if isinstance(atom, core.Literal) else env.get(atom, atom) for atom in atoms]
