"""Applies a model with low-rank adapters without adding them to its matrices.

The model is traced. Each product ``x @ w`` with an adapted matrix becomes ``x @ w + (x @ a) @ b``,
whose gradient needs no matrix of the size of `w`. Where many members of a population share `w`, all
of them are in one product with it, in place of one product for each with a matrix of its own.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend import core
from jax.extend.core import primitives

from functrain.rewrites._equations import substitute
from functrain.rewrites._pass import inline


class Adapter(NamedTuple):
    """The adapter of a matrix.

    Attributes:
      a: `[*inputs, rank]`, with the factor of the adapter.
      b: `[rank, *outputs]`.
    """

    a: Any
    b: Any


def merge(w: jax.Array, a: jax.Array, b: jax.Array) -> jax.Array:
    """Returns a matrix with its adapter added, in the dtype of the matrix."""
    merged: jax.Array = w.astype(a.dtype) + jnp.tensordot(a, b, 1)
    return merged.astype(w.dtype)


def apply_factored(
    function: Callable[..., Any], leaves: Sequence[Any], adapters: Mapping[int, Adapter], *args: Any
) -> Any:
    """Returns ``function(leaves, *args)`` for leaves to some of which adapters are added.

    Args:
      function: A function of arrays.
      leaves: The params.
      adapters: The adapters, by the index of their matrix in `leaves`.
      *args: Further pytrees of arrays.
    """

    def traced(leaves: Any, adapters: Any, *args: Any) -> Any:
        return function(leaves, *args)

    closed, shapes = jax.make_jaxpr(traced, return_shape=True)(list(leaves), adapters, *args)
    jaxpr: Any = closed.jaxpr
    if not jaxpr.eqns:  # It returns its arguments.
        merged = [merge(w, *adapters[i]) if i in adapters else w for i, w in enumerate(leaves)]
        return function(merged, *args)
    # Dicts are flattened in the order of their keys.
    adapter_vars = iter(jaxpr.invars[len(leaves) :])
    adapted = {jaxpr.invars[i]: Adapter(*_take_two(adapter_vars)) for i in sorted(adapters)}
    run: Any = core.jaxpr_as_fun(closed.replace(jaxpr=_Factoring(adapted).rewrite(jaxpr)))
    outputs = run(*jax.tree.leaves((list(leaves), adapters, args)))
    return jax.tree.unflatten(jax.tree.structure(shapes), outputs)


def _take_two(iterator: Any) -> tuple[Any, Any]:
    return next(iterator), next(iterator)


class _Factoring:
    """One pass over a jaxpr, some of whose variables are matrices with adapters."""

    def __init__(self, adapted: dict[Any, Adapter]) -> None:
        self._adapted = adapted
        self._merged: dict[Any, Any] = {}
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
        outvars = substitute(substitutions, jaxpr.outvars)
        # A model may return a matrix itself.
        last = jaxpr.eqns[-1]
        outvars = [self._merge(x, last) if self._is_adapted(x) else x for x in outvars]
        return jaxpr.replace(eqns=self._eqns, outvars=outvars, debug_info=jaxpr.debug_info)

    def _rewrite_equation(self, eqn: core.JaxprEqn) -> list[Any]:
        """Adds the equations that replace one that reads an adapted matrix; returns its outputs."""
        if eqn.primitive is primitives.convert_element_type_p:
            # Mixed precision. The adapters are converted where they are used.
            self._eqns.append(eqn)
            self._adapted[eqn.outvars[0]] = self._adapted[eqn.invars[0]]
            return list(eqn.outvars)
        if eqn.primitive is primitives.dot_general_p:
            for side in (0, 1):
                if product := self._product(eqn, side):
                    adapter = self._adapted[eqn.invars[side]]
                    return self._inline(product, eqn, [*eqn.invars, *adapter])
        # Convolutions, embeddings, loops and others need the matrix.
        invars = [self._merge(x, eqn) if self._is_adapted(x) else x for x in eqn.invars]
        self._eqns.append(eqn.replace(invars=invars))
        return list(eqn.outvars)

    def _product(self, eqn: core.JaxprEqn, side: int) -> Callable[..., list[Any]] | None:
        """Returns a function that computes a product with a matrix on this side, if it can."""
        w: Any = eqn.invars[side]
        x: Any = eqn.invars[1 - side]
        if not self._is_adapted(w) or self._is_adapted(x):
            return None
        contracted, batch = eqn.params["dimension_numbers"]
        input_axes = len(self._adapted[w].a.aval.shape) - 1
        axes = contracted[side]
        over_inputs = sorted(axes) == list(range(input_axes))
        over_outputs = sorted(axes) == list(range(input_axes, w.aval.ndim))
        is_float = jnp.issubdtype(x.aval.dtype, jnp.floating)
        if batch[side] or not is_float or not (over_inputs or over_outputs):
            return None
        # The axes of `b` are the rank and the outputs.
        first_axes = axes if over_inputs else tuple(axis - input_axes + 1 for axis in axes)
        second_axis = 0 if over_inputs else input_axes
        precision = eqn.params["precision"]

        def dot(x: Any, y: Any, x_axes: Any, y_axes: Any) -> Any:
            pairs = (x, y), (x_axes, y_axes)
            # The matrix stays on its side, so that the axes of the result are in their order.
            operands, dimensions = pairs if side else tuple(pair[::-1] for pair in pairs)
            return lax.dot_general(*operands, (dimensions, ((), ())), precision=precision)

        def product(lhs: Any, rhs: Any, a: Any, b: Any) -> list[Any]:
            out = eqn.primitive.bind(lhs, rhs, **eqn.params)
            x = lhs if side else rhs
            first, second = (a, b) if over_inputs else (b, a)
            low = dot(x, first.astype(x.dtype), contracted[1 - side], first_axes)
            rank_axis = low.ndim - 1 if side else 0
            added = dot(low, second.astype(x.dtype), (rank_axis,), (second_axis,))
            return [out + added.astype(out.dtype)]

        return product

    def _is_adapted(self, atom: Any) -> bool:
        return not isinstance(atom, core.Literal) and atom in self._adapted

    def _merge(self, w: Any, eqn: Any) -> Any:
        """Returns the variable of a matrix with its adapter added, computed before an equation."""
        if w not in self._merged:
            self._merged[w] = self._inline(lambda *xs: [merge(*xs)], eqn, [w, *self._adapted[w]])[0]
        return self._merged[w]

    def _inline(self, function: Any, eqn: Any, inputs: Sequence[Any]) -> list[Any]:
        eqns, outs = inline(function, eqn, inputs)
        self._eqns += eqns
        return outs
