"""The fused program: a scan of a step over a chunk of batches."""

import dataclasses
from collections.abc import Callable
from typing import Any, Generic

import jax
from jax import lax

from functrain import _tree
from functrain._types import PyTree, StateT, Step
from functrain.fusion._programs import Program, cached


def fuse(step: Step[StateT], k: int, *, unroll: int = 1, donate: bool = True) -> "Fused[StateT]":
    """Returns one compiled program that takes K steps.

    The program scans `step` over a chunk, for K = 1 too. With the default ``unroll=1`` the
    results do not depend on K, to the bit: a fit in chunks of 32 equals one in chunks of 7.

    Args:
      step: ``(state, batch) -> (state, logs)``, pure, over any pytree state.
      k: Steps per program, at least 1.
      unroll: How many steps the loop's body holds; more than 1 can be faster on tiny models and
        changes the last bits.
      donate: Reuse the state's buffers for the new state. The state passed in is then CONSUMED:
        its arrays are deleted. Copy what you keep.

    Returns:
      ``fused(state, chunk) -> (state, logs)``: every leaf of `chunk` is `[K, ...]`, and so is
      every leaf of `logs`. Compiled once per shape of its arguments; calling `fuse` again with
      the same step does not compile again.

    Raises:
      ValueError: `k` or `unroll` is below 1; or (when called) the chunk's leading axis is not K,
        or two leaves of a donated state share a buffer.
      TypeError: (when called) the step changes its state's structure, shapes, dtypes or weak
        types.

    Examples:
      >>> import jax.numpy as jnp
      >>> def step(state, batch):
      ...     return state + jnp.sum(batch), {"seen": state}
      >>> state, logs = fuse(step, 3)(jnp.zeros(()), jnp.ones((3, 8)))
      >>> print(state, logs["seen"])
      24.0 [ 0.  8. 16.]
    """
    for name, value in (("k", k), ("unroll", unroll)):
        if value < 1:
            raise ValueError(f"{name}: expected at least 1, got {value}")
    if not callable(step):
        raise TypeError(f"step: expected (state, batch) -> (state, logs), got {step!r}")
    program = cached(
        step, ("fuse", k, unroll, donate), lambda get: _program(get, k, unroll, donate)
    )
    return Fused(step, k, program)


@dataclasses.dataclass(frozen=True, eq=False)
class Fused(Generic[StateT]):
    """A step fused K times; what `fuse` returns.

    Attributes:
      step: The step it repeats.
      k: Steps per call.
      program: The `jax.jit` object that does the work, for `lower`, `trace` and the like.

    Examples:
      >>> import jax.numpy as jnp
      >>> fused = fuse(lambda state, batch: (state + batch, state), 2)
      >>> fused.k
      2
      >>> "while" in fused.program.lower(jnp.zeros(()), jnp.ones(2)).as_text()
      True
    """

    step: Step[StateT]
    k: int
    program: Any

    def __call__(self, state: StateT, chunk: PyTree) -> tuple[StateT, PyTree]:
        """Takes K steps; see `fuse`."""
        try:
            result: tuple[StateT, PyTree] = self.program(state, chunk)
        except jax.errors.JaxRuntimeError as error:
            shared = _tree.aliases((state, chunk)) if "donate" in str(error) else []
            if not shared:
                raise
            pairs = [" and ".join(_name(path) for path in pair) for pair in shared]
            raise ValueError(
                "state: expected every leaf in a buffer of its own, since the program takes them "
                f"over (donation). These share one:\n{_tree.bullets(pairs)}\nCopy one of each "
                "with jnp.copy, or pass donate=False. Nothing was changed."
            ) from error
        return result


def scan_steps(step: Callable[..., Any], k: int, unroll: int = 1) -> Callable[..., Any]:
    """Returns ``(state, chunk) -> (state, logs)``, the scan itself, not compiled."""

    def body(state: PyTree, batch: PyTree) -> tuple[PyTree, PyTree]:
        new, logs = step(state, batch)
        check_carry(state, new)
        return new, logs

    def scanned(state: PyTree, chunk: PyTree) -> tuple[PyTree, PyTree]:
        check_chunk(chunk, k)
        return lax.scan(body, state, chunk, length=k, unroll=unroll)

    return scanned


def check_chunk(chunk: PyTree, k: int) -> None:
    """Refuses a chunk whose leaves do not all have the leading axis K."""
    wrong = [
        f"{path}: {_tree.spec(leaf)}"
        for path, leaf in _tree.leaves_with_path(chunk)
        if not getattr(leaf, "shape", ()) or leaf.shape[0] != k
    ]
    if wrong:
        raise ValueError(
            f"chunk: expected {k} stacked batches, every leaf [{k}, ...], got\n"
            f"{_tree.bullets(wrong)}\n"
            "Stack them with jax.tree.map(lambda *leaves: np.stack(leaves), *batches), or take "
            "them from ArrayLoader.chunk(epoch, start, k)."
        )


def check_carry(old: PyTree, new: PyTree) -> None:
    """Refuses a step whose new state does not fit where the old one was."""
    changed = _tree.differences(old, new)
    if changed:
        raise TypeError(
            "step: expected a new state of the old one's structure, shapes and dtypes, got\n"
            f"{_tree.bullets(changed)}\n"
            "A program that repeats the step needs them constant. Cast with "
            "x.astype(old.dtype), and make numbers in the state arrays of a given dtype, such as "
            "jnp.zeros((), jnp.float32)."
        )


def _program(get: Callable[[], Any], k: int, unroll: int, donate: bool) -> Program:
    def fused(state: PyTree, chunk: PyTree) -> tuple[PyTree, PyTree]:
        result: tuple[PyTree, PyTree] = scan_steps(get(), k, unroll)(state, chunk)
        return result

    return jax.jit(fused, donate_argnums=0 if donate else ())


def _name(path: str) -> str:
    """Turns a path in (state, chunk) into one that says which of them it is in."""
    root, _, rest = path.partition("/")
    return "/".join(filter(None, (("state", "chunk")[int(root)], rest)))
