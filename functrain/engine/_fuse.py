"""The fused program: many steps over a chunk of batches."""

import dataclasses
from collections.abc import Callable
from typing import Any, Generic

import jax
import numpy as np

from functrain import rewrites as _rewrites
from functrain.common import _tree
from functrain.common._checks import is_whole
from functrain.common._types import PyTree, StateT, Step
from functrain.engine._guards import guarded
from functrain.engine._loop import check_stacked, repeat, scan
from functrain.engine._programs import Program, cached
from functrain.rewrites import Mode


def fuse(
    step: Step[StateT],
    k: int,
    *,
    unroll: int = 1,
    donate: bool = True,
    rewrites: Mode = "auto",
) -> "Fused[StateT]":
    """Returns a compiled program that takes K steps, or fewer.

    On CPU the results do not depend on K, to the bit: a fit in chunks of 32 equals one in chunks
    of 7, and one in single steps. The program loops for K = 1 too, and the compiler is not told
    how often, so that it always compiles the same body.

    Args:
      step: ``(state, batch) -> (state, logs)``, pure, over any pytree state.
      k: Steps per program, at least 1.
      unroll: How many steps the loop's body holds; more than 1 can be faster on tiny models and
        changes the last bits.
      donate: Reuse the state's buffers for the new state. The state passed in is then CONSUMED:
        its arrays are deleted. Copy what you keep.
      rewrites: Which slow operations to rewrite on CPU: "auto", "exact" (those only that keep
        every bit under jit) or "off"; see `functrain.rewrites`.

    Returns:
      ``fused(state, chunk, steps=K) -> (state, logs)``: every leaf of `chunk` is `[K, ...]`, and
      so is every leaf of `logs`. With fewer `steps` only the first so many batches are used, and
      the rest of the logs is zeros. Compiled once per shape of state and chunk; calling `fuse`
      again with the same step does not compile again.

    Raises:
      ValueError: `k` or `unroll` is below 1; or (when called) the chunk's leading axis is not K,
        `steps` is not within 1 to K, or two leaves of a donated state share a buffer, or the
        state has been consumed already.
      TypeError: (when called) the step changes its state's structure, shapes, dtypes or weak
        types.

    Examples:
      >>> import jax.numpy as jnp
      >>> def step(state, batch):
      ...     return state + jnp.sum(batch), {"seen": state}
      >>> fused = fuse(step, 3)
      >>> state, logs = fused(jnp.zeros(()), jnp.ones((3, 8)))
      >>> print(state, logs["seen"])
      24.0 [ 0.  8. 16.]
      >>> state, logs = fused(state, jnp.ones((3, 8)), steps=2)
      >>> print(state, logs["seen"])
      40.0 [24. 32.  0.]
    """
    for name, value in (("k", k), ("unroll", unroll)):
        if not is_whole(value, 1):
            raise ValueError(f"{name}: expected a whole number, at least 1, got {value!r}")
    if not callable(step):
        raise TypeError(f"step: expected (state, batch) -> (state, logs), got {step!r}")
    chosen = _rewrites.mode(rewrites)
    # Off CPU a loop of known length needs no word from the host for each round.
    known = unroll > 1 or jax.default_backend() != "cpu"

    def program(whole: bool) -> Program:
        return cached(
            step,
            ("fuse", k, unroll, donate, chosen, whole),
            lambda get: _program(get, k, unroll if whole else 0, donate, chosen),
        )

    partial = program(whole=False)
    return Fused(step, k, program(whole=True) if known else partial, partial)


@dataclasses.dataclass(frozen=True, eq=False)
class Fused(Generic[StateT]):
    """A step fused K times; what `fuse` returns.

    Attributes:
      step: The step it repeats.
      k: Steps per call.
      program: The `jax.jit` object that takes all K, ``program(state, chunk, i32[])``, for
        `lower`, `trace` and the like.
      partial: The one that takes as many as its last argument says; the same object on CPU.

    Examples:
      >>> import jax.numpy as jnp
      >>> fused = fuse(lambda state, batch: (state + batch, state), 2)
      >>> fused.k
      2
      >>> "while" in fused.program.lower(jnp.zeros(()), jnp.ones(2), 2).as_text()
      True
    """

    step: Step[StateT]
    k: int
    program: Any
    partial: Any

    def __call__(
        self, state: StateT, chunk: PyTree, steps: int | None = None
    ) -> tuple[StateT, PyTree]:
        """Takes K steps, or the first `steps` of them; see `fuse`."""
        n = self.k if steps is None else steps
        if not 1 <= n <= self.k:
            raise ValueError(f"steps: expected 1 to {self.k}, got {n}")
        if jax.local_device_count() > 1:
            _refuse_aliases(state, chunk)  # jax itself ends the process there
        try:
            return self.dispatch(state, chunk, n)
        except (RuntimeError, ValueError) as error:  # which of them, varies with the message
            _refuse_consumed(state)
            if "donate" in str(error):
                _refuse_aliases(state, chunk, error)
            raise

    def dispatch(self, state: StateT, chunk: PyTree, steps: int) -> tuple[StateT, PyTree]:
        """Takes the first `steps` of K steps, without looking at the state first."""
        program = self.program if steps == self.k else self.partial
        result: tuple[StateT, PyTree] = program(state, chunk, np.int32(steps))
        return result


def _refuse_aliases(state: PyTree, chunk: PyTree, cause: Exception | None = None) -> None:
    pairs = [" and ".join(map(_name, pair)) for pair in _tree.aliases((state, chunk))]
    if pairs:
        raise ValueError(
            "state: expected every leaf in a buffer of its own, since the program takes them "
            f"over (donation). These share one:\n{_tree.bullets(pairs)}\nCopy one of each "
            "with jnp.copy, or pass donate=False. Nothing was changed."
        ) from cause


def _refuse_consumed(state: PyTree) -> None:
    gone = [p for p, x in _tree.leaves_with_path(state) if _tree.is_deleted(x)]
    if gone:
        raise ValueError(
            "state: expected live arrays, got some that an earlier program took over (donation):\n"
            f"{_tree.bullets(gone)}\nGo on with the state which that program returned; copy what "
            "you want to keep, or pass donate=False."
        )


def _program(get: Callable[[], Any], k: int, unroll: int, donate: bool, rewrites: Mode) -> Program:
    """Returns the compiled loop: of known length if `unroll` is not 0."""

    def fused(state: PyTree, chunk: PyTree, n: jax.Array) -> tuple[PyTree, PyTree]:
        check_stacked(chunk, k)
        step = _rewrites.optimize(get(), rewrites)
        with guarded():
            return scan(step, state, chunk, unroll) if unroll else repeat(step, state, chunk, n)

    return jax.jit(fused, donate_argnums=0 if donate else ())


def _name(path: str) -> str:
    """Turns a path in (state, chunk) into one that says which of them it is in."""
    root, _, rest = path.partition("/")
    return "/".join(filter(None, (("state", "chunk")[int(root)], rest)))
