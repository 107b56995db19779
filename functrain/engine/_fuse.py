"""The fused step: a compiled program of many steps over a chunk of batches."""

import dataclasses
import functools
import operator
import types
from typing import Any, Generic, NamedTuple, TypeAlias

import jax
from jax.extend.backend import backends

from functrain import rewrites as _rewrites
from functrain.common import _repr, _tree
from functrain.common._checks import is_integer, require_integer
from functrain.common._types import PyTree, StateT, Step
from functrain.common._wide_integers import require_integers_fit
from functrain.engine._placement import sharding_of_scalars
from functrain.engine._programs import (
    TRAINING,
    LoopOptions,
    Program,
    count_on,
    loop_options,
    program,
)
from functrain.rewrites import Mode
from functrain.step._check import check_step


def fuse(
    step: Step[StateT], k: int, *, unroll: int = 1, donate: bool = True, rewrites: Mode = "auto"
) -> "Fused[StateT]":
    """Returns a compiled program that takes K steps, or fewer.

    On CPU the results do not depend on K, to the bit: a fit in chunks of 32 equals one in chunks
    of 7, and one in single steps. The program has a loop for K = 1 too, and the compiler does not
    know the number of rounds, so that it always compiles the same body.

    Args:
      step: ``(state, batch) -> (state, logs)``, pure, over any pytree state.
      k: Steps per program, at least 1.
      unroll: The number of steps in the loop's body. More than 1 can be faster for tiny models,
        and changes the last bits of the results.
      donate: True to reuse the state's buffers for the new state. The state passed in is then
        CONSUMED: its arrays are deleted. Copy the arrays that you want to keep.
      rewrites: Which slow operations to rewrite: "auto", "exact" (only those that keep
        every bit under jit) or "off"; see `functrain.rewrites`.

    Returns:
      ``fused(state, chunk, steps=K) -> (state, logs)``: every leaf of `chunk` is `[K, ...]`, and
      so is every leaf of `logs`. With `steps` below K only the first `steps` batches are used, and
      the remaining rows of the logs are zeros. The program is compiled once per shape of state and
      chunk; calling `fuse` again with the same step does not compile again.

    Raises:
      ValueError: `k` or `unroll` is below 1; or (when called) the chunk's leading axis is not K,
        `steps` is not within 1 to K, two leaves of a donated state share a buffer, or the state
        has been consumed already.
      TypeError: `step` is not a function, or is a loss; or (when called) the step changes its
        state's structure, shapes, dtypes or weak types.

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
    require_integer("k", k)
    require_integer("unroll", unroll)
    check_step(step)
    # Raises for a mode that does not exist.
    _rewrites.resolve_mode(rewrites)
    return Fused(step, k, unroll=unroll, donate=donate, rewrites=rewrites)


class Fused(Generic[StateT]):
    """A step fused K times, as `fuse` returns it.

    The program is made for the devices of its arguments: lowered for shapes on a
    `functrain.target`, it is the one that a TPU or GPU would run. With a number of steps below K, a
    tracer or a shape, it can take any number of steps, in a loop that is not unrolled. Lowered, it
    has a third result if the step has no logs: a number that is ready when all of it has run.

    Attributes:
      step: The step that the program repeats.
      k: Steps per call.

    Examples:
      >>> import jax.numpy as jnp
      >>> fused = fuse(lambda state, batch: (state + batch, state), 2)
      >>> fused.k
      2
      >>> "while" in fused.lower(jnp.zeros(()), jnp.ones(2)).as_text()
      True
    """

    def __init__(
        self, step: Step[StateT], k: int, *, unroll: int, donate: bool, rewrites: Mode
    ) -> None:
        self.step = step
        self.k = k
        self._unroll, self._donate, self._rewrites = unroll, donate, rewrites
        # By the number of steps: what the last call with so many steps has looked up.
        self._ready: dict[int, _Ready] = {}

    def __repr__(self) -> str:
        """Shows the step's name and K."""
        return f"Fused({_repr.name(self.step)}, k={self.k})"

    def __call__(
        self, state: StateT, chunk: PyTree, steps: int | None = None
    ) -> tuple[StateT, PyTree]:
        """Takes K steps, or the first `steps` of them; see `fuse`."""
        n = self.k if steps is None else steps
        placement = None if _has_one_device() else _placement_of(state)
        # Of a tracer, nothing is kept; nor is it an int.
        ready = self._ready.get(n) if type(n) is int else None
        if ready is None or ready.placement != placement:
            ready = self._look_up(state, n, placement)
        # A program returns the same shardings each time: the next comparison is one of identities.
        ready.placement = placement
        require_integers_fit(chunk, "chunk")
        if placement is not None and self._donate and jax.device_count() > 1:
            # On several devices jax does not raise for a buffer that is donated twice: it ends the
            # process.
            _require_donatable(state, chunk)
        compiled = ready.program or program(self.step, TRAINING, ready.options)
        try:
            new_state, rows, _ = compiled(state, chunk, ready.count)
        except (RuntimeError, ValueError) as error:
            # jax raises one class or the other for a bad donation, depending on the message.
            if "deleted" in str(error) or "donate" in str(error):
                _require_donatable(state, chunk, error)
            raise
        return new_state, rows

    def lower(self, state: StateT, chunk: PyTree, steps: Any = None) -> jax.stages.Lowered:
        """Lowers the program, as `jax.jit(...).lower` does."""
        n = self.k if steps is None else steps
        lowered: jax.stages.Lowered = self._program(state, n).lower(state, chunk, n)
        return lowered

    def trace(self, state: StateT, chunk: PyTree, steps: Any = None) -> jax.stages.Traced:
        """Traces the program, as `jax.jit(...).trace` does."""
        n = self.k if steps is None else steps
        traced: jax.stages.Traced = self._program(state, n).trace(state, chunk, n)
        return traced

    def _program(self, state: PyTree, steps: Any) -> Any:
        return program(self.step, TRAINING, self._options(state, steps))

    def _options(self, state: PyTree, steps: Any) -> LoopOptions:
        """Returns the options of the program for the devices of a state, and a number of steps.

        Args:
          state: The state, or its shapes.
          steps: The number of steps. A tracer or a shape may stand for any number.
        """
        is_number = is_integer(steps, 1) or not hasattr(steps, "dtype")
        if is_number and not (is_integer(steps, 1) and steps <= self.k):
            raise ValueError(f"steps: expected a whole number from 1 to {self.k}, got {steps!r}")
        require_integers_fit(state, "state")
        options = loop_options(state, rewrites=self._rewrites, donate=self._donate)
        is_full = is_number and steps == self.k
        return options.with_steps(self.k, is_full=is_full, unroll=self._unroll)

    def _look_up(self, state: PyTree, steps: Any, placement: "_Placement | None") -> "_Ready":
        """Looks at all leaves of a state for what a call needs, and keeps it for the next calls."""
        options = self._options(state, steps)
        scalars = sharding_of_scalars(state) if jax.device_count() > 1 else None
        count = steps if hasattr(steps, "dtype") else count_on(scalars, steps)
        # The attributes of an object may change, and with them the program.
        is_function = isinstance(self.step, types.FunctionType)
        compiled = program(self.step, TRAINING, options) if is_function else None
        ready = _Ready(placement, options, count, compiled)
        if type(steps) is int and placement != ():
            self._ready[steps] = ready
        return ready


# The default device, and the sharding of each leaf.
_Placement: TypeAlias = tuple[Any, ...]
_get_sharding = operator.attrgetter("sharding")


@dataclasses.dataclass(eq=False, slots=True)
class _Ready:
    """What the calls of a fused step look up once, since a look at all leaves takes time.

    Attributes:
      placement: That of the states that this is for; None where there is only one device.
      options: The options of the program.
      count: The number of steps, on the devices of the program.
      program: The program; None if it may change from call to call.
    """

    placement: _Placement | None
    options: LoopOptions
    count: jax.Array
    program: Program | None


@functools.cache
def _has_one_device() -> bool:
    """Returns True if all of JAX's backends together have one device."""
    return jax.device_count() == 1 and len(backends()) == 1


def _placement_of(state: PyTree) -> _Placement:
    """Returns the placement of a state; an empty one if some of its leaves have none, as in NumPy.

    Two placements are compared faster than two leaves are looked at in Python: a program returns
    the same objects each time.
    """
    try:
        default = jax.config.jax_default_device  # type: ignore[attr-defined, unused-ignore]
        return default, *map(_get_sharding, jax.tree.leaves(state))
    except AttributeError:
        return ()


class _Arguments(NamedTuple):
    """The arguments of a program; the field names become part of the paths in errors."""

    state: PyTree
    chunk: PyTree


def _require_donatable(state: PyTree, chunk: PyTree, cause: Exception | None = None) -> None:
    """Raises ValueError if leaves of the state are consumed, or share buffers with arguments."""
    leaves = _tree.leaves_with_path(state)
    problems = [f"{path}: consumed by a program" for path, x in leaves if _tree.is_deleted(x)]
    for first, second in _tree.aliases(_Arguments(state, chunk)):
        # Two leaves of the chunk may share one: the chunk is not donated.
        if first.startswith("state") or second.startswith("state"):
            problems.append(f"{first} and {second}: one buffer")
    if problems:
        raise ValueError(
            "state: expected live arrays with buffers of their own, since the program takes them "
            f"over (donation), got\n{_tree.bullets(problems)}\nContinue with the state that the "
            "program returned; copy arrays with jnp.copy, or pass donate=False."
        ) from cause
