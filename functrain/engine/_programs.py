"""Compiled programs: a body repeated over a chunk, kept for as long as the step lives."""

import types
import weakref
from collections.abc import Callable, Hashable
from typing import Any, NamedTuple, TypeAlias

import jax

from functrain import rewrites as _rewrites
from functrain.common._compile import jit
from functrain.common._types import PyTree
from functrain.engine._guards import tracing_guards
from functrain.engine._loop import check_stacked, reject_text_logs, repeat
from functrain.engine._notes import error_notes
from functrain.engine._placement import Pins, pin_carry
from functrain.rewrites import Mode

Program: TypeAlias = Callable[..., Any]


class Kind(NamedTuple):
    """What a program does with a step.

    Attributes:
      name: Tells the programs of one step apart.
      body: Makes of a step what the program repeats: ``body(carry, batch, *const) -> (carry,
        row)``, where the constants are the same for all batches.
    """

    name: str
    body: Callable[[Any], Callable[..., tuple[PyTree, PyTree]]]


TRAINING = Kind("train", lambda step: step)


class LoopOptions(NamedTuple):
    """How a program goes about it; part of the key it is kept under.

    Attributes:
      k: Batches it has room for.
      rewrites: Which slow operations to rewrite.
      takes_all: Whether it always takes all K, in a loop of known length.
      unroll: Steps in the loop's body.
      donate: Whether it takes over the carry's buffers.
      pins: Where to keep the carry's leaves; None where that is no question.
    """

    k: int
    rewrites: Mode
    takes_all: bool = False
    unroll: int = 1
    donate: bool = True
    pins: Pins | None = None


def program(step: Any, kind: Kind, loop: LoopOptions) -> Program:
    """Returns ``program(carry, chunk, i32[], *const) -> (carry, rows, done)``.

    It is compiled when called. The i32[] says how many batches of the chunk to take, the rows are
    `[K, ...]`, and `done` is a number that is there when all of the program is.
    """
    return cached_program(step, (kind.name, loop), lambda get: _compiled(get, kind, loop))


def prefers_static_length() -> bool:
    """Whether a loop should be told how often it runs.

    Off CPU a loop of unknown length needs a word from the host for each round. On CPU the compiler
    must not know, so that results do not depend on K.
    """
    return jax.default_backend() != "cpu"


def _compiled(get: Callable[[], Any], kind: Kind, loop: LoopOptions) -> Program:
    def run(
        carry: PyTree, chunk: PyTree, n: jax.Array, *const: PyTree
    ) -> tuple[PyTree, PyTree, jax.Array]:
        check_stacked(chunk, loop.k)
        step = get()
        body = _rewrites.optimize(reject_text_logs(kind.body(step)), loop.rewrites)

        def once(carry: PyTree, batch: PyTree) -> Any:
            with error_notes(batch):
                return pin_carry(body(carry, batch, *const), loop.pins)

        with tracing_guards(step):
            some = None if loop.takes_all else n
            carry, rows = repeat(once, carry, chunk, loop.k, some, loop.unroll)
        return carry, rows, n + 0

    donated = 0 if loop.donate else ()
    kept = {} if loop.pins is None else {"out_shardings": (loop.pins.tree(), None, None)}
    compiled: Program = jit(run, donate_argnums=donated, **kept)
    return compiled


# id(step) -> (the step, weakly; its programs). Keyed by identity, and never by a strong reference:
# a step closes over models and optimizers, which must be free to go.
_programs: dict[int, tuple[weakref.ref[Any], dict[Hashable, Program]]] = {}


def cached_program(
    step: Any, key: Hashable, build: Callable[[Callable[[], Any]], Program]
) -> Program:
    """Returns the program of a step under a key, built at the first call.

    So that two calls of `fit` with one step compile once.

    Args:
      step: The step. The caller keeps it alive for as long as it uses the program.
      key: Tells the programs of one step apart.
      build: Given a function that returns the step, makes the program. The program must reach the
        step through that function only.
    """
    anchor, key, get = _anchored(step, key)
    try:
        reference = weakref.ref(anchor)
    except TypeError:  # an object without weak references
        return build(lambda: step)
    identity = id(anchor)
    known = _programs.get(identity)
    if known is None or known[0]() is not anchor:
        weakref.finalize(anchor, _programs.pop, identity, None)
        known = _programs[identity] = (reference, {})
    programs = known[1]
    if key not in programs:
        programs[key] = build(lambda: get(reference()))
    return programs[key]


def compute_metrics(step: Any, metrics: PyTree) -> Any:
    """Returns what the metrics of a step come to, as arrays on the device: in one program."""
    return cached_program(step, "compute", lambda get: jit(lambda m: get().values(m)))(metrics)


def _anchored(step: Any, key: Hashable) -> tuple[Any, Hashable, Callable[[Any], Any]]:
    """Returns what lives as long as the step: itself, or the object whose method it is."""
    if isinstance(step, types.MethodType):  # made anew at each look-up
        function = step.__func__
        return step.__self__, (function, key), lambda owner: types.MethodType(function, owner)
    return step, key, lambda step: step
