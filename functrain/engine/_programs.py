"""Compiled programs: a body repeated over a chunk, cached for as long as the step lives."""

import dataclasses
import functools
import types
import weakref
from collections.abc import Callable, Hashable
from typing import Any, NamedTuple, TypeAlias

import jax
import numpy as np

from functrain import rewrites as _rewrites
from functrain.common import _tree
from functrain.common._platform import compiling_for, platform_of
from functrain.common._types import PyTree, traits_of
from functrain.engine._guards import tracing_guards
from functrain.engine._loop import check_results, check_stacked, repeat
from functrain.engine._placement import Pins, pin_carry, read_pins
from functrain.rewrites import Mode
from functrain.rewrites._compile import WITHOUT_MOTION, jit, jit_without_arithmetic
from functrain.step._notes import error_notes
from functrain.targets._chips import on_chip_bytes

Program: TypeAlias = Callable[..., Any]


class Kind(NamedTuple):
    """The purpose of a program: training, evaluation or prediction.

    Attributes:
      name: Part of the program's cache key.
      body: Given a step, returns the function that the program repeats: ``body(carry, batch,
        *const) -> (carry, row)``. The constants are the same for all batches.
    """

    name: str
    body: Callable[[Any], Callable[..., tuple[PyTree, PyTree]]]


TRAINING = Kind("train", check_results)


class LoopOptions(NamedTuple):
    """The options of a program; part of its cache key, so hashable. `loop_options` makes them.

    Attributes:
      k: Batches in a chunk.
      rewrites: Which slow operations to rewrite.
      platform: The platform that the program is compiled for.
      takes_all: True if the program always takes all K batches, in a loop of known length.
      unroll: Steps in the loop's body.
      donate: True if the program takes over the carry's buffers.
      pins: The shardings that the carry's leaves keep; None on a single device.
      on_chip_bytes: `Chip.on_chip_bytes` of the device.
    """

    k: int
    rewrites: Mode
    platform: str
    takes_all: bool = False
    unroll: int = 1
    donate: bool = True
    pins: Pins | None = None
    on_chip_bytes: int = 0

    def with_steps(self, k: int, *, is_full: bool, unroll: int = 1) -> "LoopOptions":
        """Returns the options of a program of K steps, all of which it takes if `is_full`."""
        # Off CPU, in each round of a loop of unknown length the host has to wait for the condition.
        # On CPU the compiler must not know the length, so that results do not depend on K. A loop
        # of unknown length cannot be unrolled.
        takes_all = is_full and (unroll > 1 or self.platform != "cpu")
        return self._replace(k=k, takes_all=takes_all, unroll=unroll if is_full else 1)


def loop_options(carry: PyTree, *const: PyTree, rewrites: Mode, donate: bool = True) -> LoopOptions:
    """Returns the options of programs of one step on the devices of a carry and constants."""
    platform = platform_of((carry, const))
    return LoopOptions(
        1,
        _rewrites.resolve_mode(rewrites, platform),
        platform,
        donate=donate,
        pins=read_pins(carry),
        on_chip_bytes=on_chip_bytes(carry) if platform == "tpu" else 0,
    )


def program(step: Any, kind: Kind, loop: LoopOptions) -> Program:
    """Returns ``program(carry, chunk, i32[], *const) -> (carry, rows, done)``.

    It is compiled when it is first called. The i32[] is the number of batches to take, from
    `count_on`, and the rows are `[K, ...]`. `done` is a number that is ready when all of the
    program has run; None if the step trains and has logs, which serve as well.
    """
    key = kind.name, loop
    compiled: Program = cached_program(step, key, lambda get_step: _build(get_step, kind, loop))
    return compiled


@functools.lru_cache(maxsize=1024)
def count_on(sharding: jax.sharding.Sharding | None, n: int) -> jax.Array:
    """Returns i32[] on the devices of a program, from the second call on without a transfer.

    Args:
      sharding: From `sharding_of_scalars`; None leaves the number uncommitted.
      n: The number.
    """
    number = np.int32(n)
    if sharding is not None and not sharding.is_fully_addressable:
        # `device_put` would compare the values among the processes.
        return jax.make_array_from_callback((), sharding, lambda _: number)
    # Within `jax.jit` as well, where it would be a tracer, which must not be kept.
    with jax.ensure_compile_time_eval():
        count: jax.Array = jax.device_put(number, sharding)
    return count


def _build(get_step: Callable[[], Any], kind: Kind, loop: LoopOptions) -> Program:
    def run(
        carry: PyTree, chunk: PyTree, n: jax.Array, *const: PyTree
    ) -> tuple[PyTree, PyTree, jax.Array | None]:
        check_stacked(chunk, loop.k)
        step = get_step()
        body = _rewrites.optimize(kind.body(step), loop.rewrites)

        def run_step(carry: PyTree, batch: PyTree) -> Any:
            with error_notes(batch):
                carry, row = body(carry, batch, *const)
                return pin_carry(carry, loop.pins), row

        def run_chunk(carry: PyTree, chunk: PyTree) -> tuple[PyTree, PyTree]:
            steps = None if loop.takes_all else n
            return repeat(
                run_step, carry, chunk, loop.k, steps, loop.unroll, unfused=loop.rewrites == "exact"
            )

        # Only training changes a state; and one that is divided is on several chips.
        is_whole = kind is TRAINING and loop.pins is None
        chip_bytes = loop.on_chip_bytes if is_whole else 0
        with tracing_guards(), compiling_for(loop.platform):
            carry, rows = traits_of(step).run_chunk(run_chunk, carry, chunk, n, chip_bytes)
        # The driver needs a result to wait for that the next program does not consume. It costs a
        # kernel. The outputs of a prediction would do, but are large.
        needs_number = kind is not TRAINING or not jax.tree.leaves(rows)
        # Attributes that a step changes while it is traced, such as a counter, are no changes.
        get_step()
        return carry, rows, n + 0 if needs_number else None

    donated = 0 if loop.donate else ()
    # Without these the compiler chooses the shardings of the results; see `read_pins`.
    shardings = (
        {} if loop.pins is None else {"out_shardings": (jax.tree.unflatten(*loop.pins), None, None)}
    )
    # Only on CPUs have the bits been compared with those outside of a loop.
    keeps_bits = loop.rewrites == "exact" and loop.platform == "cpu"
    compiler_options = WITHOUT_MOTION if keeps_bits else None
    compiled: Program = jit(
        run, compiler_options=compiler_options, donate_argnums=donated, **shardings
    )
    return compiled


@dataclasses.dataclass(eq=False)
class _Entry:
    """The programs of a step.

    Attributes:
      owner: A weak reference to the object whose lifetime counts.
      programs: The programs by their keys.
      attributes: The attributes of the object when it was last traced.
    """

    owner: Callable[[], Any]
    programs: dict[Hashable, Any]
    attributes: dict[str, Any]

    def get_owner(self) -> Any:
        """Returns the object, whose attributes tracing may change: a counter, for example."""
        owner = self.owner()
        self.attributes = _attributes(owner)
        return owner


# By the id of the step. Never by a strong reference: a step closes over models and optimizers,
# which must be free to be collected.
_entries: dict[int, _Entry] = {}


def cached_program(step: Any, key: Hashable, build: Callable[[Callable[[], Any]], Any]) -> Any:
    """Returns the program of a step under a key, or another result, built at the first call.

    So two calls of `fit` with one step compile once. If the step is an object or a method of one,
    its programs are built again after one of its attributes was changed.

    Args:
      step: The step. The caller keeps it alive for as long as it uses the program.
      key: Distinguishes the programs of one step.
      build: Given a function that returns the step, makes the program. The program must reach the
        step only through that function: a strong reference would keep the step alive.
    """
    owner: Any = step
    get_step: Callable[[Any], Any] = lambda owner: owner  # noqa: E731
    # Python makes a new bound method at each attribute access, so the object it is bound to counts.
    if isinstance(step, types.MethodType):
        owner, key = step.__self__, (step.__func__, key)
        get_step = functools.partial(types.MethodType, step.__func__)
    attributes, entry = _attributes(owner), _entries.get(id(owner))
    # An id is used again once its object is gone, so the reference has to agree.
    if entry is None or entry.owner() is not owner:
        try:
            entry = _entries[id(owner)] = _Entry(weakref.ref(owner), {}, attributes)
        except TypeError:
            # Objects with __slots__, among others, take no weak references: nothing is cached.
            return build(lambda: step)
        weakref.finalize(owner, _entries.pop, id(owner), None)
    if attributes != entry.attributes:
        entry.programs, entry.attributes = {}, attributes
    if key not in entry.programs:
        entry.programs[key] = build(lambda: get_step(entry.get_owner()))
    return entry.programs[key]


def _attributes(owner: Any) -> dict[str, Any]:
    """Returns the attributes of an object that are constants of its programs: numbers and arrays.

    Not those of functions, which are seldom changed; nor containers and other objects, whose
    contents may change unseen.
    """
    attributes = {} if isinstance(owner, types.FunctionType) else getattr(owner, "__dict__", {})
    constants: dict[str, Any] = {}
    for name, value in attributes.items():
        if isinstance(value, bool | int | float | complex | str | np.generic):
            # As text, in which a NaN is equal to itself and True is not 1.
            constants[name] = repr(value)
        elif isinstance(value, np.ndarray | jax.Array):
            # By its identity. The array is kept, as its programs keep it, so that no other one gets
            # its id meanwhile.
            constants[name] = id(value), value
    return constants


def compute_metrics(step: Any, metrics: PyTree) -> Any:
    """Computes the values of a step's metrics in one program; returns arrays on the device."""
    return cached_program(step, "compute", lambda get: jit(lambda m: get().values(m)))(metrics)


def initial_metrics(step: Any, state: PyTree) -> Callable[[], PyTree]:
    """Returns a program that makes a step's metrics before the first batch, in new buffers."""

    def build(get_step: Callable[[], Any]) -> Any:
        metrics = get_step().start(state).metrics
        return jit_without_arithmetic(lambda: _tree.copy(metrics))

    make: Program = cached_program(step, ("initial metrics", _tree.signature(state)), build)
    return make


def metric_names(step: Any) -> frozenset[str]:
    """Returns the names of the values that a step's metrics compute."""
    names: frozenset[str] = cached_program(step, "metric names", lambda get: _trace_names(get()))
    return names


def _trace_names(step: Any) -> frozenset[str]:
    with tracing_guards():
        # In two steps: an init may return numbers, by which Python could not divide.
        values = jax.eval_shape(step.metrics.compute, jax.eval_shape(step.metrics.init))
    _tree.require_scalars(values)
    return frozenset(path for path, _ in _tree.leaves_with_path(values))
