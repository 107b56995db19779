"""Scans: the parts of their inputs, the size of their bodies, and scans of a part of a body."""

import functools
from collections.abc import Sequence
from typing import Any

import jax
from jax import lax
from jax.extend import core
from jax.extend.core import primitives

from functrain.rewrites._equations import (
    avals,
    has_known_sizes,
    nbytes,
    ndim,
    open_jaxpr,
    variables,
    walk_equations,
)

# The most bytes of a value in a small body. What is larger takes longer than a kernel to start.
MAX_VALUE_BYTES = 2**21


def split_inputs(
    inputs: Sequence[Any], eqn: core.JaxprEqn
) -> tuple[dict[Any, Any], dict[Any, Any], dict[Any, Any]]:
    """Returns the constants, carries and stacked arrays of a scan, by the variables of its body.

    Args:
      inputs: The inputs of the scan.
      eqn: The scan.
    """
    # The parameters that hold these counts have different names in different versions of jax, so
    # they are counted: a stacked array has one more axis outside of the body than inside.
    body = open_jaxpr(eqn.params["jaxpr"])
    num_carry = len(eqn.outvars) - _count_stacked(eqn.outvars, body.outvars)
    xs_start = len(inputs) - _count_stacked(eqn.invars, body.invars)
    carry_start = xs_start - num_carry
    pairs = list(zip(body.invars, inputs, strict=True))
    return dict(pairs[:carry_start]), dict(pairs[carry_start:xs_start]), dict(pairs[xs_start:])


def _count_stacked(outer: Sequence[Any], inner: Sequence[Any]) -> int:
    return sum(ndim(a) != ndim(b) for a, b in zip(outer, inner, strict=True))


def is_known_loop(params: dict[str, Any]) -> bool:
    """Returns True for a scan without effects, of a known length above 1."""
    length = params["length"]
    # The length may be a symbol, as in a shape-polymorphic export: it cannot be compared with 1.
    return isinstance(length, int) and length > 1 and not params["jaxpr"].effects


def trace_scan(inputs: Sequence[jax.Array], params: dict[str, Any]) -> core.JaxprEqn:
    """Returns the equation of a scan with these inputs and parameters.

    A rewrite's `replace` gets no equation, and the parameters alone do not tell carries from other
    outputs.
    """
    bind = functools.partial(primitives.scan_p.bind, **params)
    eqn: core.JaxprEqn = jax.make_jaxpr(bind)(*inputs).eqns[-1]
    return eqn


def scan_part(
    params: dict[str, Any],
    outvars: Sequence[Any],
    consts: dict[Any, jax.Array],
    carry: dict[Any, jax.Array],
    xs: dict[Any, jax.Array],
) -> tuple[list[jax.Array], list[jax.Array]]:
    """Scans over the part of a body that computes some of its variables.

    Args:
      params: The parameters of the scan.
      outvars: The next values of the carries, then the variables to stack.
      consts: Variables of the body that are the same in all iterations, and their values.
      carry: Variables that are carried, and their initial values.
      xs: Variables with other values in each iteration, and their values, stacked.

    Returns:
      The final values of the carries, and the stacked variables.
    """
    run = core.jaxpr_as_fun(with_outputs(params["jaxpr"], outvars, [*consts, *carry, *xs]))

    def body(carry_values: list[jax.Array], x: list[jax.Array]) -> Any:
        outs = run(*consts.values(), *carry_values, *x)
        return outs[: len(carry)], outs[len(carry) :]

    options = {name: params[name] for name in ("length", "reverse", "unroll")}
    last, ys = lax.scan(body, list(carry.values()), list(xs.values()), **options)
    return last, ys


def is_small(params: dict[str, Any], max_bytes: int) -> bool:
    """Returns True if the kernels of a scan's body take less time than it takes to start them.

    Args:
      params: The parameters of the scan.
      max_bytes: The most bytes that the values of all iterations may take.
    """
    total = 0
    for eqn, _, executions in walk_equations(params["jaxpr"]):
        # Inside of a scan whose length is a symbol, the number of executions is one as well.
        if not isinstance(executions, int) or not all(map(has_known_sizes, avals(eqn))):
            return False
        outputs = list(map(nbytes, eqn.outvars))
        total += params["length"] * executions * sum(outputs)
        if max([*outputs, *map(nbytes, eqn.invars)], default=0) > MAX_VALUE_BYTES:
            return False
    return total <= max_bytes


def with_outputs(closed: Any, outvars: Sequence[Any], invars: Sequence[Any] | None = None) -> Any:
    """Returns the jaxpr with other outputs, without the equations that they do not need.

    Args:
      closed: A `Jaxpr` or `ClosedJaxpr`.
      outvars: Variables or literals of the jaxpr.
      invars: Variables to take as inputs; by default those of the jaxpr. The equations that
        compute them are left out.
    """
    jaxpr = open_jaxpr(closed)
    invars = jaxpr.invars if invars is None else list(invars)
    needed, eqns = set(variables(outvars)) - set(invars), []
    for eqn in reversed(jaxpr.eqns):
        if needed.intersection(eqn.outvars):
            needed |= set(variables(eqn.invars)) - set(invars)
            eqns.append(eqn)
    # The names of the old inputs and outputs do not fit the new ones.
    debug_info = jaxpr.debug_info._replace(arg_names=None, result_paths=None)
    new = jaxpr.replace(
        invars=invars, outvars=list(outvars), eqns=eqns[::-1], debug_info=debug_info
    )
    return new if closed is jaxpr else closed.replace(jaxpr=new)
