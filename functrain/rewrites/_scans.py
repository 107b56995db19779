"""The bodies of scans: their size, and parts of them as jaxprs."""

from collections.abc import Sequence
from typing import Any

from functrain.rewrites._equations import nbytes, open_jaxpr, variables, walk_equations

# The most bytes of a value in a small body. What is larger takes longer than a kernel to start.
MAX_VALUE_BYTES = 2**21


def is_small(params: dict[str, Any], max_bytes: int) -> bool:
    """Returns True if the kernels of a scan's body take less time than it takes to start them.

    Args:
      params: The parameters of the scan.
      max_bytes: The most bytes that the values of all iterations may take.
    """
    total = 0
    for eqn, _, executions in walk_equations(params["jaxpr"]):
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
