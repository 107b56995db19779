"""Matrices with low-rank adapters, and models that use them without computing the sums."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeGuard

import jax
import jax.numpy as jnp
from jax.extend import core
from jax.extend.core import primitives

from functrain.common import _tree
from functrain.common._types import PyTree
from functrain.rewrites._equations import ndim, substitute
from functrain.rewrites._pass import inline


class Adapted(NamedTuple):
    """A matrix and its adapter.

    Attributes:
      w: `[*inputs, *outputs]`.
      a: `[*inputs, rank]`, with the factor of the adapter.
      b: `[rank, *outputs]`.
    """

    w: Any
    a: Any
    b: Any


class Quantized(NamedTuple):
    """A matrix in int8.

    Attributes:
      values: `i8[...]`, with the shape of the matrix.
      scale: The factor of each output, in the dtype of the matrix.
    """

    values: jax.Array
    scale: jax.Array


def quantize(w: Any, first_output: int) -> Quantized:
    """Returns a matrix as int8 with one scale for each output, rounded symmetrically."""
    w = jnp.asarray(w)
    wide = _tree.at_least_float32(w)
    exact = jnp.max(jnp.abs(wide), axis=tuple(range(first_output)), keepdims=True) / 127
    scale = exact.astype(w.dtype)
    # Rounded up, because a weight must not be more than 127 times the scale, and float16 has few
    # digits for small numbers.
    is_below = _tree.at_least_float32(scale) < exact
    scale = jnp.where(is_below, jnp.nextafter(scale, jnp.full_like(scale, jnp.inf)), scale)
    # An output whose weights are all zero has the scale 1, by which they can be divided.
    scale = jnp.where(scale > 0, scale, jnp.ones_like(scale))
    # In half precision the quotients would be rounded as well, before they are rounded to integers.
    values = jnp.round(wide / _tree.at_least_float32(scale)).astype(jnp.int8)
    return Quantized(values, scale)


def dequantize(w: Any) -> jax.Array:
    """Returns a matrix of a base, which may be quantized, as an array."""
    if isinstance(w, Quantized):
        w = w.values.astype(w.scale.dtype) * w.scale
    return jnp.asarray(w)


def add_adapters(params: PyTree) -> PyTree:
    """Returns params with the sum in place of each `Adapted` matrix."""
    return jax.tree.map(lambda x: _add(*x) if _is_adapted(x) else x, params, is_leaf=_is_adapted)


def _is_adapted(x: Any) -> TypeGuard[Adapted]:
    return isinstance(x, Adapted)


def _add(w: jax.Array, a: jax.Array, b: jax.Array) -> jax.Array:
    """Returns a matrix with its adapter added, in the dtype of the matrix."""
    total: jax.Array = w.astype(a.dtype) + jnp.tensordot(a, b, 1)
    return total.astype(w.dtype)


def apply_factored(function: Callable[..., Any], params: PyTree, *args: PyTree) -> Any:
    """Returns ``function(add_adapters(params), *args)``, if it can without the sums.

    The function is traced. Each product ``x @ w`` with an adapted matrix becomes
    ``x @ w + (x @ a) @ b``, whose gradient needs no matrix of the size of `w`. Where many members
    of a population share `w`, all of them are in one product with it, in place of one product for
    each with a matrix of its own.
    """

    def traced(params: PyTree, *args: PyTree) -> Any:
        matrices = jax.tree.map(lambda x: x.w if _is_adapted(x) else x, params, is_leaf=_is_adapted)
        return function(matrices, *args)

    inputs = (params, *args)
    closed, shapes = jax.make_jaxpr(traced, return_shape=True)(*inputs)
    jaxpr: Any = closed.jaxpr
    if not jaxpr.eqns:  # It returns its arguments.
        return function(add_adapters(params), *args)
    variables = jax.tree.unflatten(jax.tree.structure(inputs), jaxpr.invars)
    adapted = {x.w: (x.a, x.b) for x in _tree.nodes(variables, Adapted)}
    run: Any = core.jaxpr_as_fun(closed.replace(jaxpr=_Factoring(adapted).rewrite(jaxpr)))
    outputs = run(*jax.tree.leaves(inputs))
    return jax.tree.unflatten(jax.tree.structure(shapes), outputs)


class _Factoring:
    """One pass over a jaxpr, some of whose variables are matrices with adapters.

    Args:
      adapted: The variables of `a` and `b`, by that of the matrix.
    """

    def __init__(self, adapted: dict[Any, tuple[Any, Any]]) -> None:
        self._adapted = adapted
        self._sums: dict[Any, Any] = {}
        self._eqns: list[core.JaxprEqn] = []

    def rewrite(self, jaxpr: Any) -> Any:
        """Returns the jaxpr that computes with adapters; it has the same inputs and outputs."""
        substitutions: dict[Any, Any] = {}
        pending = list(reversed(jaxpr.eqns))
        while pending:
            eqn = pending.pop()
            eqn = eqn.replace(invars=substitute(substitutions, eqn.invars))
            if not any(map(self._is_adapted, eqn.invars)):
                self._eqns.append(eqn)
            elif eqn.primitive is primitives.jit_p:
                called = core.jaxpr_as_fun(eqn.params["jaxpr"])
                eqns, outs = inline(called, eqn, eqn.invars)
                pending += reversed(eqns)
                substitutions.update(zip(eqn.outvars, outs, strict=True))
            else:
                outs = self._rewrite_equation(eqn)
                substitutions.update(zip(eqn.outvars, outs, strict=True))
        # A model may return a matrix itself.
        outvars = self._without_adapted(substitute(substitutions, jaxpr.outvars), jaxpr.eqns[-1])
        return jaxpr.replace(eqns=self._eqns, outvars=outvars, debug_info=jaxpr.debug_info)

    def _rewrite_equation(self, eqn: core.JaxprEqn) -> list[Any]:
        """Adds the equations that replace one that reads an adapted matrix; returns its outputs."""
        are_adapted = [self._is_adapted(x) for x in eqn.invars]
        if eqn.primitive is primitives.convert_element_type_p:
            # Mixed precision. The adapters are converted where they are used.
            self._adapted[eqn.outvars[0]] = self._adapted[eqn.invars[0]]
        elif eqn.primitive is primitives.dot_general_p and len(set(are_adapted)) == 2:
            side = are_adapted.index(True)
            adapter = self._adapted[eqn.invars[side]]
            return self._inline(_product(eqn, side), eqn, [*eqn.invars, *adapter])
        else:
            # Convolutions, embeddings, loops and others need the matrix.
            eqn = eqn.replace(invars=self._without_adapted(eqn.invars, eqn))
        self._eqns.append(eqn)
        return list(eqn.outvars)

    def _is_adapted(self, atom: Any) -> bool:
        return not isinstance(atom, core.Literal) and atom in self._adapted

    def _without_adapted(self, atoms: Sequence[Any], eqn: Any) -> list[Any]:
        """Returns variables with sums in place of matrices, computed before an equation."""
        for w in filter(self._is_adapted, atoms):
            if w not in self._sums:
                inputs = [w, *self._adapted[w]]
                (self._sums[w],) = self._inline(lambda *x: [_add(*x)], eqn, inputs)
        return substitute(self._sums, atoms)

    def _inline(self, function: Any, eqn: Any, inputs: Sequence[Any]) -> list[Any]:
        eqns, outs = inline(function, eqn, inputs)
        self._eqns += eqns
        return outs


def _product(eqn: core.JaxprEqn, side: int) -> Callable[..., list[Any]]:
    """Returns the function that computes a product with an adapted matrix on this side."""
    contracted, batch = eqn.params["dimension_numbers"]
    left, right = map(ndim, eqn.invars)
    # The axes are numbered for `jnp.einsum`: those of the left side, those of the right, the rank.
    axes, rank = (list(range(left)), list(range(left, left + right))), left + right
    for i, j in (*zip(*contracted, strict=True), *zip(*batch, strict=True)):
        axes[1][j] = axes[0][i]
    left_only = [i for i in axes[0] if i not in axes[1]]
    right_only = [i for i in axes[1] if i not in axes[0]]
    out_axes = [*batch[0], *left_only, *right_only]

    def product(*operands: Any) -> list[Any]:
        *sides, a, b = operands
        out = eqn.primitive.bind(*sides, **eqn.params)
        w, w_axes, inputs = sides[side], axes[side], a.ndim - 1
        terms = [
            *(sides[1 - side], axes[1 - side]),
            *(a.astype(w.dtype), [*w_axes[:inputs], rank]),
            *(b.astype(w.dtype), [rank, *w_axes[inputs:]]),
        ]
        # It multiplies in the order that takes the fewest operations.
        added = jnp.einsum(*terms, out_axes, precision=eqn.params["precision"])
        return [out + added.astype(out.dtype)]

    return product
