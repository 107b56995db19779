"""The error function in exact gelu: 1 - erf instead of erfc.

XLA's erfc computes two series for each number, one of them for the tail, and selects one of the
results. Other libraries compute gelu, `x / 2 * erfc(-x / sqrt(2))`, without the tail: an error of
one rounding of 1 in erfc is an error of one rounding of x or less in gelu. For erfc in general that
would be wrong, since `log(erfc(x))` needs the tail. So this rewrite applies only if the erfc is
multiplied by its own x, and has no other consumer.

Microseconds of gelu and its gradient, 2 cores, jax 0.10, alone under `jit` and in a loop
(`jit/loop`), the minimum of 25 alternating runs on a busy machine; float32:

    8 64         46/13 -> 44/14         (hence: 2**12 numbers or more)
    32 256       90/102 -> 67/23
    16 64 256    574/1524 -> 444/986
    32 49 256    2350/1795 -> 1463/1140
    16 64 512    2024/2514 -> 1246/1788
    8 197 768    6234/7533 -> 3632/4558

    gelu of a dense layer, and the gradient of its weights
    16 64 64     to 256  2835/2847 -> 2201/2197
    16 64 128    to 512  7703/7254 -> 6035/6323

A separate series that is accurate in the tail, once `exp` is known, gained 2 % of such a layer.

The last bits change. For x below 0 the absolute error of gelu is at most two roundings of x, and
that of its gradient two roundings of 1. Between -5.6 and -3 that can be 2.3 times gelu itself.
"""

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend import core
from jax.extend.core import primitives

from functrain.rewrites._equations import are_floats, avals, find_consumers, find_producers
from functrain.rewrites._rewrite import Rewrite

# Smaller arrays gain nothing: see the row "8 64" of the table.
MIN_ELEMENTS = 2**12


def _applies(eqn: core.JaxprEqn) -> bool:
    operand = avals(eqn)[0]
    return are_floats(operand) and operand.dtype == jnp.float32 and operand.size >= MIN_ELEMENTS


def _is_in_gelu(eqn: core.JaxprEqn, jaxpr: core.Jaxpr) -> bool:
    """Returns True if all consumers multiply erfc(-x / sqrt(2)), at least one of them by x."""
    producers = find_producers(jaxpr)
    (result,) = eqn.outvars
    # The inputs of `eqn` may be new variables; those of the same equation in the jaxpr are not.
    x, factor = _split_multiple(producers[result].invars[0], producers)
    if not math.isclose(factor, -math.sqrt(0.5), rel_tol=1e-6):
        return False
    consumers = find_consumers(result, jaxpr)
    if any(consumer.primitive is not primitives.mul_p for consumer in consumers):
        return False
    if any(out is result for out in jaxpr.outvars):
        return False
    # The result may also be squared, so the other factor is the one that is not the result.
    factors = [atom for consumer in consumers for atom in consumer.invars if atom is not result]
    return any(_split_multiple(atom, producers)[0] is x for atom in factors)


def _split_multiple(atom: Any, producers: dict[Any, core.JaxprEqn]) -> tuple[Any, float]:
    """Returns the value that an atom is a multiple of, and the factor.

    Args:
      atom: A variable or a literal of a jaxpr.
      producers: The equation that computes each variable.
    """
    factor = 1.0
    while not isinstance(atom, core.Literal) and (eqn := producers.get(atom)):
        literals = [operand.val for operand in eqn.invars if isinstance(operand, core.Literal)]
        if eqn.primitive is primitives.neg_p:
            factor = -factor
        elif eqn.primitive is primitives.mul_p and len(literals) == 1 and np.ndim(literals[0]) == 0:
            factor *= float(literals[0])
        else:
            break
        (atom,) = (operand for operand in eqn.invars if not isinstance(operand, core.Literal))
    return atom, factor


def _replace(x: jax.Array, **_: object) -> jax.Array:
    return 1 - lax.erf(x)


gelu = Rewrite(
    name="gelu",
    primitive=primitives.erfc_p,
    applies=_applies,
    replace=_replace,
    reason="gelu needs no accurate tail, for which erfc computes a second series",
    applies_in_context=_is_in_gelu,
)
