"""Questions about equations: what they compute, where they are, and what is around them."""

import collections
import math
import os
import sys
import weakref
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend import core, source_info_util
from jax.extend.core import primitives
from jax.sharding import AxisType

from functrain.common import _tree

# The jaxprs of these primitives are called as functions, so an equal function may replace them.
# Other primitives may use their jaxprs in any way; those jaxprs stay unchanged.
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
    """Returns True if the pass also rewrites the jaxprs inside this equation."""
    # `jax.extend` does not export the primitive of shard_map, so it is recognized by its name.
    return eqn.primitive in _CALLS or eqn.primitive.name == "shard_map"


def is_apart(eqn: core.JaxprEqn) -> bool:
    """Returns True if XLA compiles the jaxprs of an equation apart from those around it.

    In loops and branches it does not choose the layouts of convolutions, as it does around them.
    """
    return eqn.primitive in (primitives.scan_p, primitives.while_p, primitives.cond_p)


def walk_equations(
    jaxpr: Any, executions: int = 1
) -> Iterator[tuple[core.JaxprEqn, core.Jaxpr, int]]:
    """Yields each equation that the pass sees, its jaxpr, and how often one call executes it.

    The body of a scan counts once per iteration. The number of iterations of a `while` is unknown,
    so its body counts once; so does every branch of a `cond`.
    """
    for eqn in jaxpr.eqns:
        yield eqn, getattr(jaxpr, "jaxpr", jaxpr), executions
        if is_entered(eqn):
            is_scan = eqn.primitive is primitives.scan_p
            inner_executions = executions * eqn.params["length"] if is_scan else executions
            for inner in core.jaxprs_in_params(eqn.params):
                yield from walk_equations(inner, inner_executions)


def split_inputs(
    inputs: Sequence[Any], scan: core.JaxprEqn
) -> tuple[dict[Any, Any], dict[Any, Any], dict[Any, Any]]:
    """Returns the constants, carries and stacked arrays of a scan, by the variables of its body."""
    # The parameters that hold these counts have different names in different versions of jax, so
    # they are counted: a stacked array has one more axis outside of the body than inside.
    body = open_jaxpr(scan.params["jaxpr"])
    num_carry = len(scan.outvars) - _count_stacked(scan.outvars, body.outvars)
    xs_start = len(inputs) - _count_stacked(scan.invars, body.invars)
    carry_start = xs_start - num_carry
    pairs = list(zip(body.invars, inputs, strict=True))
    return dict(pairs[:carry_start]), dict(pairs[carry_start:xs_start]), dict(pairs[xs_start:])


def _count_stacked(outer: Sequence[Any], inner: Sequence[Any]) -> int:
    return sum(ndim(a) != ndim(b) for a, b in zip(outer, inner, strict=True))


def describe_types(eqn: core.JaxprEqn) -> str:
    """Returns an equation's types, such as ``float32[8] -> float32[]``."""
    sides = eqn.invars, eqn.outvars
    return " -> ".join(" ".join(_tree.strong_spec(x.aval) for x in atoms) for atoms in sides)


def describe_location(eqn: core.JaxprEqn) -> str:
    """Returns the layer an equation came from, if it has a name, and its source line."""
    # Without the folder in front of it, and the function behind it.
    line = source_info_util.summarize(eqn.source_info).rpartition("/")[2].partition(" ")[0]
    return "  ".join(filter(None, [str(eqn.source_info.name_stack), line]))


def library_folders() -> tuple[str, ...]:
    """Returns the folders of libraries whose lines do not help a user."""
    names = "bridge", "equinox", "flax", "functrain", "jax", "keras", "optax"
    modules = filter(None, map(sys.modules.get, names))
    return tuple(f"{folder}{os.sep}" for module in modules for folder in module.__path__)


def describe_user_line(eqn: core.JaxprEqn) -> str:
    """Returns the layer an equation came from, and the source line outside of libraries."""
    traceback = eqn.source_info.traceback
    frames: list[Any] = [] if traceback is None else traceback.frames
    folders = library_folders()
    lines = [f"{x.file_name}:{x.line_num}" for x in frames if not x.file_name.startswith(folders)]
    return " at ".join(filter(None, [str(eqn.source_info.name_stack), *lines[:1]]))


def product_dtypes(jaxpr: Any) -> collections.Counter[str]:
    """Returns how many products of matrices and convolutions have each floating-point dtype.

    The dtype of a product is the wider of its operands'; those in loops count each time.
    """
    counts: collections.Counter[str] = collections.Counter()
    for eqn, _, executions in walk_equations(jaxpr):
        if eqn.primitive in (primitives.dot_general_p, primitives.conv_general_dilated_p):
            dtypes = [aval.dtype for aval in avals(eqn)[:2]]
            if all(jnp.issubdtype(dtype, jnp.floating) for dtype in dtypes):
                counts[str(max(dtypes, key=lambda dtype: dtype.itemsize))] += executions
    return counts


# Kept while the jaxpr lives: rules that look around ask for it at every equation.
_producers: weakref.WeakKeyDictionary[core.Jaxpr, dict[Any, core.JaxprEqn]] = (
    weakref.WeakKeyDictionary()
)


def _producers_of(jaxpr: core.Jaxpr) -> dict[Any, core.JaxprEqn]:
    """Returns the equation that computes each variable."""
    if jaxpr not in _producers:
        _producers[jaxpr] = {out: eqn for eqn in jaxpr.eqns for out in eqn.outvars}
    return _producers[jaxpr]


def find_producer(atom: Any, jaxpr: core.Jaxpr) -> core.JaxprEqn | None:
    """Returns the equation that computes an atom; None for an input of the jaxpr or a literal."""
    return None if isinstance(atom, core.Literal) else _producers_of(jaxpr).get(atom)


def substitute(substitutions: dict[Any, Any], atoms: Sequence[Any]) -> list[Any]:
    """Returns the atoms with variables replaced; literals, which are not hashable, are kept."""
    return [a if isinstance(a, core.Literal) else substitutions.get(a, a) for a in atoms]


def avals(eqn: core.JaxprEqn) -> list[Any]:
    """Returns the abstract values (shapes and dtypes) of an equation's inputs and outputs."""
    return [var.aval for var in (*eqn.invars, *eqn.outvars)]


def ndim(var: Any) -> int:
    """Returns the number of axes of an equation's input or output."""
    return len(var.aval.shape)


def are_floats(*arrays: Any) -> bool:
    """Returns True if all are real floats of 16 bits or more, of known and positive sizes."""
    return all(map(_is_float, arrays))


def _is_float(x: Any) -> bool:
    return (
        jnp.issubdtype(x.dtype, jnp.floating)
        and x.dtype.itemsize > 1
        # Without x64, jax cannot make a float64 array, so no replacement could return one.
        and jax.dtypes.canonicalize_dtype(x.dtype) == x.dtype
        and has_known_sizes(x)
        and all(size > 0 for size in x.shape)
    )


def has_known_sizes(x: Any) -> bool:
    """Returns False if a size is a symbol, as in a shape-polymorphic export."""
    return all(isinstance(size, int) for size in x.shape)


def are_wide_floats(eqn: core.JaxprEqn) -> bool:
    """Returns True if all arrays of an equation are unsharded and of one dtype.

    The dtype is that of real floats of 32 bits or more. The sizes are known and positive.
    """
    types = avals(eqn)
    return (
        are_floats(*types)
        and len({aval.dtype for aval in types}) == 1
        and types[0].dtype.itemsize >= 4
        and not any(map(is_sharded, types))
        and is_sharding_free(eqn.params)
    )


def is_sharded(x: Any, except_axis: int | None = None) -> bool:
    """Returns True if the type of an array shards an axis other than `except_axis`."""
    sharding = getattr(x, "sharding", None)
    spec = sharding.spec if sharding is not None else ()
    return any(name is not None for axis, name in enumerate(spec) if axis != except_axis)


def is_sharding_free(params: dict[str, Any]) -> bool:
    """Returns True if an equation leaves the sharding of its output to the compiler."""
    sharding = params.get("out_sharding")
    # Inside shard_map jax sets an `out_sharding` on a mesh without explicit axes; it demands
    # nothing.
    return sharding is None or AxisType.Explicit not in sharding.mesh.axis_types


def is_zero(atom: Any) -> bool:
    """Returns True if an input of an equation is the scalar literal 0."""
    return isinstance(atom, core.Literal) and ndim(atom) == 0 and float(atom.val) == 0


def open_jaxpr(jaxpr: Any) -> Any:
    """Returns the jaxpr inside a ClosedJaxpr, which is the same class since jax 0.12."""
    return jaxpr if isinstance(jaxpr, core.Jaxpr) else jaxpr.jaxpr


def variables(atoms: Sequence[Any]) -> list[Any]:
    """Returns the atoms that are not literals."""
    return [atom for atom in atoms if not isinstance(atom, core.Literal)]


def nbytes(atom: Any) -> int:
    """Returns the bytes of a variable or literal."""
    size: int = math.prod(atom.aval.shape) * atom.aval.dtype.itemsize
    return size
