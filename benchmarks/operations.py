"""The operations of a step, and the time that each takes alone."""

import collections
import math
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

import functrain as ft
from functrain.common._platform import current_platform
from functrain.rewrites._equations import is_entered, walk_equations
from functrain.rewrites._optimize import rules_for
from functrain.rewrites._rewrite import select_rewrite

# XLA fuses these primitives into their neighbours, so they add little or no time.
FUSED = set(
    """
    abs add add_any and bitcast_convert_type broadcast_in_dim ceil clamp concatenate
    convert_element_type copy copy_p cos div eq erf erf_inv exp expand_dims expm1 floor ge gt
    integer_pow iota is_finite le log log1p logistic lt max min mul ne neg not
    one_minus_square optimization_barrier or pad pow random_seed random_unwrap random_wrap rem
    reshape rev round rsqrt select_n shift_left shift_right_arithmetic shift_right_logical sign sin
    slice split sqrt square squeeze stop_gradient sub tanh transpose xor
    """.split()  # noqa: SIM905
)
# Operations that read and write fewer bytes are left out, because their measured time would be that
# of the loop around them.
SMALL = 2**14
# The minimum duration of one measurement.
SECONDS = 0.03


class Operation(NamedTuple):
    """Equations of a step that do the same work.

    Attributes:
      eqn: One of the equations.
      count: The number of evaluations in a step.
      rule: The name of the rewrite that replaces the equations, or "".
    """

    eqn: Any
    count: int
    rule: str

    @property
    def flops(self) -> int:
        """The floating-point operations of one evaluation; 0 if it is not a product."""
        return _flops(self.eqn)

    @property
    def nbytes(self) -> int:
        """The bytes that one evaluation reads and writes."""
        return sum(map(_nbytes, (*self.eqn.invars, *self.eqn.outvars)))


def operations(step: ft.Step[Any], state: Any, batch: Any, rewrites: Any) -> list[Operation]:
    """Returns the operations of a step, except those that are fused or small."""
    mode = ft.rewrites.resolve_mode(rewrites)
    closed = jax.make_jaxpr(step)(state, batch)
    rules = [] if mode == "off" else rules_for(current_platform())
    counts: collections.Counter[str] = collections.Counter()
    examples = {}
    for eqn, jaxpr, times in walk_equations(closed):
        if not is_entered(eqn) and eqn.primitive.name not in FUSED:
            types = [str(var.aval) for var in (*eqn.invars, *eqn.outvars)]
            key = f"{eqn.primitive} {types} {sorted(eqn.params.items(), key=lambda i: i[0])}"
            counts[key] += times
            examples[key] = eqn, jaxpr
    all_operations = []
    for key, (eqn, jaxpr) in examples.items():
        selected = select_rewrite(rules, eqn, jaxpr, exact_only=mode == "exact")
        all_operations.append(Operation(eqn, counts[key], selected[0].name if selected else ""))
    return [operation for operation in all_operations if operation.nbytes >= SMALL]


def seconds(operation: Operation, rewrites: Any) -> float:
    """Returns the seconds of one operation in the body of a loop, as in a fused step.

    The outputs are part of the loop's state, and the inputs of each iteration depend on the outputs
    of the one before. So the compiler cannot move the operation, or a part of it such as the
    transpose of an input, out of the loop.
    """
    eqn = operation.eqn
    inputs = [_example(var) for var in eqn.invars]
    once = ft.rewrites.optimize(lambda *xs: eqn.primitive.bind(*xs, **eqn.params), rewrites)

    @jax.jit
    def loop(n: jax.Array, *inputs: Any) -> Any:
        def body(_: Any, state: Any) -> Any:
            xs, outs = state
            xs = tuple(tied(x, outs[0]) for x in xs)
            return xs, jax.tree.leaves(once(*xs))

        return lax.fori_loop(0, n, body, (inputs, [_example(var) for var in eqn.outvars]))[1]

    return _per_round(lambda n: jax.block_until_ready(loop(n, *inputs)))


def dense_rate(size: int = 1024) -> float:
    """Returns the FLOP/s of a square matrix product in float32."""
    x = jnp.ones((size, size)) / size

    @jax.jit
    def loop(n: jax.Array, x: jax.Array) -> jax.Array:
        return lax.fori_loop(0, n, lambda _, y: y @ x, x)

    return 2 * size**3 / _per_round(lambda n: jax.block_until_ready(loop(n, x)))


def _per_round(run: Callable[[int], Any]) -> float:
    """Returns the seconds per iteration of a run that is long enough to be measured.

    This is the minimum of several runs, because other programs can only make a run slower.
    """
    run(1)
    n = 1
    while (duration := _timed(run, n)) < SECONDS:
        n = max(2 * n, min(100 * n, math.ceil(1.2 * n * SECONDS / max(duration, 1e-6))))
    return least(lambda: _timed(run, n)) / n


def least(run: Callable[[], float], rounds: int = 7, budget: float = 3.0) -> float:
    """Returns the minimum of several runs; stops early after `budget` seconds."""
    start = time.perf_counter()
    best = run()
    for _ in range(rounds - 1):
        if time.perf_counter() - start > budget:
            break
        best = min(best, run())
    return best


def _timed(run: Callable[[int], Any], n: int) -> float:
    start = time.perf_counter()
    run(n)
    return time.perf_counter() - start


def tied(x: jax.Array, out: jax.Array) -> jax.Array:
    """Returns x plus a zero computed from `out`, which the compiler cannot simplify away."""
    if _is_key(x):
        return jax.random.wrap_key_data(tied(jax.random.key_data(x), out))
    first = (jax.random.key_data(out) if _is_key(out) else out).ravel()[0].astype(jnp.float32)
    return x + jnp.where(jnp.abs(first) > 1e30, 1, 0).astype(x.dtype)


def _is_key(x: Any) -> bool:
    return bool(jnp.issubdtype(x.dtype, jax.dtypes.prng_key))


def _example(var: Any) -> jax.Array:
    aval = var.aval
    if _is_key(aval):
        return jax.random.split(jax.random.key(0), aval.shape) if aval.shape else jax.random.key(0)
    rng = np.random.default_rng(0)
    if jnp.issubdtype(aval.dtype, jnp.floating):
        return jnp.asarray(rng.standard_normal(aval.shape, np.float32), aval.dtype)
    # Integers may be indices, so only 0 and 1 are drawn, which are within bounds.
    return jnp.asarray(rng.integers(0, 2, aval.shape), aval.dtype)


def _nbytes(var: Any) -> int:
    size = math.prod(var.aval.shape)
    return size * getattr(var.aval.dtype, "itemsize", 4)


def _flops(eqn: Any) -> int:
    out, params = eqn.outvars[0].aval, eqn.params
    if eqn.primitive.name == "dot_general":
        (contracted, _), _ = params["dimension_numbers"]
        return 2 * out.size * math.prod(eqn.invars[0].aval.shape[axis] for axis in contracted)
    if eqn.primitive.name == "conv_general_dilated":
        rhs, spec = eqn.invars[1].aval, params["dimension_numbers"].rhs_spec
        products = rhs.size // rhs.shape[spec[0]]
        # Products with the zeros that lhs_dilation inserts do not count as work.
        return 2 * out.size * products // math.prod(params["lhs_dilation"])
    return 0
