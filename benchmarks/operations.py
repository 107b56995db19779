"""What a step consists of, and how long each operation takes by itself."""

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
from functrain.rewrites._frame import walk_equations, select_rewrite, is_entered
from functrain.rewrites._optimize import REWRITES

# XLA fuses these into their neighbours, where they cost little or nothing by themselves.
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
SMALL = 2**14  # bytes in and out: below, an operation's time is that of the loop around it
SECONDS = 0.03  # how long one measurement takes, at least


class Operation(NamedTuple):
    """Equations that do the same work.

    Attributes:
      eqn: One of them.
      count: How often a step evaluates them.
      rule: The rewrite that replaces them, or "".
    """

    eqn: Any
    count: int
    rule: str

    @property
    def flops(self) -> int:
        """Of one evaluation; 0 for what is no sum of products."""
        return _flops(self.eqn)

    @property
    def nbytes(self) -> int:
        """What one evaluation reads and writes."""
        return sum(map(_nbytes, (*self.eqn.invars, *self.eqn.outvars)))


def operations(step: ft.Step[Any], state: Any, batch: Any, rewrites: Any) -> list[Operation]:
    """Returns the operations of a step, but for those that are fused and those that are small."""
    mode = ft.rewrites.mode(rewrites)
    rules = () if mode == "off" else REWRITES
    counts: collections.Counter[str] = collections.Counter()
    examples = {}
    for eqn, jaxpr, times in walk_equations(jax.make_jaxpr(step)(state, batch)):
        if not is_entered(eqn) and eqn.primitive.name not in FUSED:
            types = [str(var.aval) for var in (*eqn.invars, *eqn.outvars)]
            key = f"{eqn.primitive} {types} {sorted(eqn.params.items(), key=lambda i: i[0])}"
            counts[key] += times
            examples[key] = eqn, jaxpr
    found = []
    for key, (eqn, jaxpr) in examples.items():
        rule = select_rewrite(rules, eqn, jaxpr, exact_only=mode == "exact")
        found.append(Operation(eqn, counts[key], rule.name if rule else ""))
    return [operation for operation in found if operation.nbytes >= SMALL]


def seconds(operation: Operation, rewrites: Any) -> float:
    """Measures one operation as the body of a loop, which is where a fused step has it.

    The outputs are part of the loop's state, and every round's smallest input depends on those of
    the round before: so nothing can be left out.
    """
    eqn = operation.eqn
    inputs = [_example(var) for var in eqn.invars]
    linked = min(range(len(inputs)), key=lambda i: inputs[i].size)
    once = ft.rewrites.optimize(lambda *xs: eqn.primitive.bind(*xs, **eqn.params), rewrites)

    @jax.jit
    def loop(n: jax.Array, *inputs: Any) -> Any:
        def body(_: Any, state: Any) -> Any:
            xs, outs = state
            xs = tuple(_tied(x, outs[0]) if i == linked else x for i, x in enumerate(xs))
            return xs, jax.tree.leaves(once(*xs))

        return lax.fori_loop(0, n, body, (inputs, [_example(var) for var in eqn.outvars]))[1]

    return _per_round(lambda n: jax.block_until_ready(loop(n, *inputs)))


def dense_rate(size: int = 1024) -> float:
    """Measures FLOP/s of a square matrix product in float32."""
    x = jnp.ones((size, size)) / size

    @jax.jit
    def loop(n: jax.Array, x: jax.Array) -> jax.Array:
        return lax.fori_loop(0, n, lambda _, y: y @ x, x)

    return 2 * size**3 / _per_round(lambda n: jax.block_until_ready(loop(n, x)))


def _per_round(run: Callable[[int], Any]) -> float:
    """Returns seconds per round, of a run that takes long enough to be measured.

    The least of some: what other programs take meanwhile is no property of an operation.
    """
    run(1)
    n = 1
    while (took := _timed(run, n)) < SECONDS:
        n = max(2 * n, min(100 * n, math.ceil(1.2 * n * SECONDS / max(took, 1e-6))))
    return least(lambda: _timed(run, n)) / n


def least(run: Callable[[], float], rounds: int = 7, budget: float = 3.0) -> float:
    """Returns the least of what some runs return, fewer if these seconds are over."""
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


def _tied(x: jax.Array, out: jax.Array) -> jax.Array:
    """Returns x, plus a zero made of another array: which the compiler cannot know."""
    if _is_key(x):
        return jax.random.wrap_key_data(_tied(jax.random.key_data(x), out))
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
    return jnp.asarray(rng.integers(0, 2, aval.shape), aval.dtype)  # indices that exist


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
        return 2 * out.size * products // math.prod(params["lhs_dilation"])  # zeros are no work
    return 0
