"""The bodies of scans: their size, and parts of them as jaxprs."""

import math
from collections.abc import Sequence
from typing import Any

from jax.extend import core

from functrain.rewrites._frame import walk_equations

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
