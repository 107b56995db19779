"""Where batches come from: passes over any data."""

import contextlib
import inspect
import itertools
import warnings
from collections.abc import Iterable, Iterator
from typing import Any, Protocol

import jax
import numpy as np

from functrain.common._gather import of_each_process
from functrain.common._types import PyTree
from functrain.data._arrays import refuse_numbers
from functrain.data._glimpse import Glimpse, compared, glimpse
from functrain.data._loader import Seekable
from functrain.data._local import Local, LocalPass
from functrain.data._resuming import Mark, Place
from functrain.data._stacks import Spec, Stack, filled
from functrain.data._stream import Made, StreamPass, made_of


class ArrayPass:
    """A pass over a loader that can be sought: full batches are gathered K at a time."""

    knows_sizes = True

    def __init__(self, loader: Seekable, epoch: int, batch: int) -> None:
        self._loader, self._epoch, self._next = loader, epoch, batch

    def _examples(self) -> int:
        whole = self._next < self._loader.full_batches
        return self._loader.batch_size if whole else self._loader.remainder

    def usual(self) -> tuple[Spec, PyTree] | None:
        """Returns what batches of full size are like."""
        return self._loader.batch_size, self._loader.shapes(self._loader.batch_size)

    def spec(self) -> Spec | None:
        """Returns the next batch's number of examples."""
        return self._examples() if self._next < len(self._loader) else None

    def peek(self) -> PyTree:
        """Returns the shapes of the next batch, which is not made yet."""
        return self._loader.shapes(self._examples())

    def take(self, most: int, k: int) -> Stack:
        """Gathers the next batches."""
        loader, start, examples = self._loader, self._next, self._examples()
        steps = max(1, min(most, loader.full_batches - start))
        self._next += steps
        if start < loader.full_batches:
            batches = filled(loader.chunk(self._epoch, start, steps), k, steps)
        else:
            batches = jax.tree.map(lambda x: x[None], loader.batch(self._epoch, start))
        return Stack(batches, steps, examples)


class Pass(Protocol):
    """A pass over data: `spec` and `peek` look at the next batch, `take` hands out batches.

    Attributes:
      knows_sizes: Whether all batches are known to be alike, but for a smaller last one.
    """

    @property
    def knows_sizes(self) -> bool: ...

    def usual(self) -> tuple[Spec, PyTree] | None:
        """Returns what batches of full size are like, if that is known."""

    def spec(self) -> Spec | None:
        """Returns the kind of the next batch; None if there is none."""

    def peek(self) -> PyTree:
        """Returns the next batch, or its shapes."""

    def take(self, most: int, k: int) -> Stack:
        """Hands out the next batches, with room for k."""


class Source:
    """Data that can be passed over.

    Args:
      data: An `ArrayLoader`, or an iterable of batches; or `Local`, of either.
      name: Of the argument, for errors.

    Attributes:
      data: The same; of `Local`, the part that this process has.
      local: Puts the parts of all processes together, where each has its own; else None.
      can_seek: Whether any batch can be asked for at any time.
      is_iterator: Whether it is gone after one pass.

    Raises:
      TypeError: `data` is neither.
      ValueError: `data` is known to hold nothing.
    """

    def __init__(self, data: Any, name: str = "data") -> None:
        self.local = data if isinstance(data, Local) else None
        data = data.data if isinstance(data, Local) else data
        self.can_seek = isinstance(data, Seekable)
        self.is_iterator = isinstance(data, Iterator)
        if not self.can_seek:
            _require_iterable(data, name)
        self.data = data
        self.name = name
        self._place: Place | None = None
        self._pass: StreamPass | None = None
        self._last: Glimpse | None = None  # of the last batch, where any can be asked for
        self._begun: StreamPass | None = None
        self._first: Made | None = None  # of the run's batches, if it was fetched once more
        self._mark: Mark | None = None  # where the next pass begins
        self._steps_before = 0  # that a loader's orders continue after

    @property
    def steps(self) -> int | None:
        """Batches in a pass; None where the data do not know."""
        try:
            return len(self.data)
        except (TypeError, NotImplementedError):
            return None

    @property
    def full_steps(self) -> int | None:
        """Those among them that are of full size, as far as is known."""
        return self.data.full_batches if self.can_seek else self.steps

    def continue_after(self, steps: int) -> None:
        """Has a loader's passes take the orders that come after so many steps.

        A pass is whole: after a part of one, the next order begins. Data that cannot be sought
        begin as they do by themselves.
        """
        self._steps_before = steps if self.can_seek else 0

    @property
    def epochs_before(self) -> int:
        """The number of a loader's epochs that come before the first pass."""
        return -(-self._steps_before // len(self.data)) if self.can_seek else 0

    def require_passes(self, epochs: int) -> None:
        """Refuses an iterator that would have to last for several epochs."""
        if epochs > 1 and self.is_iterator:
            raise ValueError(
                f"{self.name}: expected something that can be iterated {epochs} times, got an "
                "iterator, which is exhausted after one pass. Pass a list, an ArrayLoader or a "
                "loader object."
            )

    def specs(self) -> Iterator[PyTree]:
        """Yields the shapes of the batches, of each kind, as far as they are known now."""
        found = self._own_specs()
        return found if self.local is None else map(self.local.shapes, found)

    def _own_specs(self) -> Iterator[PyTree]:
        if self.can_seek:
            yield self.data.shapes(self.data.batch_size)
            if len(self.data) > self.data.full_batches:
                yield self.data.shapes(self.data.remainder)
        elif isinstance(self.data, list | tuple):
            for batch in (self.data[0], self.data[-1]):
                yield jax.tree.map(lambda x: x if hasattr(x, "shape") else np.asarray(x), batch)

    def look(self) -> PyTree | None:
        """Returns the first batch, or its shapes; None where there is none.

        Where any batch can be asked for, nothing is fetched. Else a pass is begun for it, and the
        next `begin` goes on with that.
        """
        if self.can_seek:
            return next(self.specs())
        if self._begun is None:
            self._begun = self._stream(0, 0, None)
        there = self._begun.spec() is not None
        if self.local is not None:
            self.local.require_same(self.name, int(there))
        if not there:
            return None
        found = self._begun.peek()
        return found if self.local is None else self.local.shapes(found)

    def begin(self, epoch: int, batch: int = 0) -> Pass:
        """Begins a pass, at the given batch of it; those before it are left out."""
        own: Pass
        if self.can_seek:
            own = ArrayPass(self.data, self.epochs_before + epoch, batch)
        else:
            begun, mark, self._begun, self._mark = self._begun, self._mark, None, None
            own = self._pass = begun or self._stream(epoch, batch, mark)
        return own if self.local is None else LocalPass(own, self.local, self.name)

    def passes(self, epoch: int, batch: int = 0) -> Iterator[Pass]:
        """Yields the passes that make up an epoch, from the given batch of it on: one."""
        yield self.begin(epoch, batch)

    def _stream(self, epoch: int, start: int, mark: Mark | None) -> StreamPass:
        """Begins a pass over an iterable, at the given batch: those before it are left out.

        Args:
          epoch: Number of the epoch, for errors.
          start: Number of the batch.
          mark: Of a pass over the same data: what came before is not fetched then.

        Raises:
          ValueError: There are not so many batches.
        """
        place = self._place
        iterator, first = (iter(self.data), 0) if place is None else place.begin(mark)
        items, left_out = made_of(iterator, self.name, epoch, first, place), start - first
        skipped = list(itertools.islice(items, min(left_out, 1)))
        number = len(skipped) + sum(1 for _ in itertools.islice(items, max(0, left_out - 1)))
        if number < left_out:
            raise ValueError(
                f"start: expected more than {start} batches in epoch {epoch} of {self.name}, got "
                f"{first + number}. The data are not those of the first run."
            )
        if place is not None and left_out:
            place.taken = start
            place.mark()
        return StreamPass(items, skipped[0] if skipped else self._first, place)

    def fingerprint(self) -> dict[str, Any]:
        """Returns what tells these data from others, as far as they say."""
        if self.local is not None:
            return {"data": "local", "batches": self.steps, "processes": self.local.processes}
        return self._own_fingerprint()

    def _own_fingerprint(self) -> dict[str, Any]:
        if self.can_seek:
            return dict(self.data.fingerprint())
        return {"data": type(self.data).__name__, "batches": self.steps}

    def watch(self) -> None:
        """Has the data asked where they are from now on, for `state`."""
        if not self.can_seek:
            self._place = Place(self.data)
            # grain's infinite ones have a length, too, and may have no batch there.
            with contextlib.suppress(Exception):
                self._last = glimpse(Made.of(self.data[len(self.data) - 1]).batch)

    def state(self, over: bool) -> dict[str, Any] | None:
        """Returns where the data are, if that has to be saved; None where the position says it.

        Args:
          over: Whether the pass is over.
        """
        own: dict[str, Any] | None = None
        if self._pass is not None and self._place is not None:
            mark = self._pass.mark(over)
            own = {"mark": mark, "first": self._place.first, "last": self._last}
        elif self._steps_before:
            own = {"steps_before": self._steps_before}
        if self.local is None:
            return own
        return {"each": of_each_process([self._own_fingerprint(), own])}

    def restore(self, state: dict[str, Any] | None, epoch: int, batch: int) -> list[str]:
        """Has the next pass go on where `state` was returned.

        Args:
          state: What it returned.
          epoch: Number of the epoch of that pass.
          batch: Number of the batch it will begin at.

        Returns:
          How the data differ from those of that run; nothing where they are the same.
        """
        if self.local is not None and state is not None:
            saved, state = state["each"][jax.process_index()]
            if saved != (now := self._own_fingerprint()):
                return [f"the part of this process: saved with {saved}, now {now}"]
        if self.can_seek:  # the run's first life decides, whatever state this one was given
            self._steps_before = 0 if state is None else state["steps_before"]
        if state is None or self._place is None:
            return []
        self._mark, first, last = state["mark"], state["first"], state["last"]
        if last and self._last and (found := compared(last, self._last, "last")):
            return found
        self._place.first = first
        if first["state"] is None:
            return self._replay(first["batch"], epoch, batch)
        return self._look(first["batch"], {"state": first["state"], "batch": 0, "ended": False})

    def _look(self, saved: Glimpse, mark: Mark) -> list[str]:
        """Compares the first batch of the run with the one that comes now from the same state."""
        try:
            begun = self._stream(0, 0, mark)
        except Exception as error:
            return [f"the state that was saved is not taken: {type(error).__name__}: {error}"]
        now = self._seen(begun)
        if now is None:
            return ["batches: saved with some, now none"]
        self._first = Made.of(begun.peek())
        found = compared(saved, now, "first")
        if found and now != self._seen(self._stream(0, 0, mark)):
            warnings.warn(
                f"{self.name}: a {type(self.data).__name__} gives other numbers each time, from "
                "the same state too: something in it draws random numbers that are no part of "
                "its state. The run goes on, but not to the bit.",
                stacklevel=2,
            )
            return []
        return found

    def _replay(self, saved: Glimpse, epoch: int, batch: int) -> list[str]:
        """Begins the pass now, and compares the first of the batches that are fetched again."""
        is_list = isinstance(self.data, list | tuple)
        if saved and batch and not is_list and self._mark and not self._mark["ended"]:
            warnings.warn(
                f"{self.name}: a {type(self.data).__name__} does not say where it is. Its first "
                f"{batch} batches are fetched again and left out; those after them are the same "
                "only if it gives the same batches each time.",
                stacklevel=2,
            )
        self._begun = self._stream(epoch, batch, self._mark)
        now = self._seen(self._begun)
        if now is None:  # the pass had ended: there is nothing to fetch
            return []
        return compared(saved, now, "first", numbers=is_list)

    def _seen(self, begun: StreamPass) -> Glimpse | None:
        """Fetches a first batch, and returns a glimpse of the first that was fetched."""
        begun.spec()
        return None if self._place is None else self._place.seen


def as_source(data: Any, name: str = "data") -> Source:
    """Returns a source of what `Source` takes, or the one that is given."""
    return data if isinstance(data, Source) else Source(data, name)


def _require_iterable(data: Any, name: str) -> None:
    """Refuses what is no iterable of batches, and arrays, which have to be cut into batches."""
    if inspect.isgeneratorfunction(data):
        raise TypeError(
            f"{name}: expected an iterable of batches, got the generator function "
            f"{data.__name__}, which is not one until it is called: {data.__name__}(). For more "
            "than one epoch pass an object whose __iter__ it is."
        )
    arrays = isinstance(data, dict | np.ndarray | jax.Array | str | bytes) or (
        isinstance(data, tuple) and any(hasattr(x, "shape") for x in data)
    )
    if arrays or not isinstance(data, Iterable):
        raise TypeError(
            f"{name}: expected an ArrayLoader or an iterable of batches, got "
            f"{type(data).__name__}. For arrays: functrain.ArrayLoader((x, y), batch_size); "
            "to predict, ArrayLoader(x, batch_size)."
        )
    if isinstance(data, list | tuple):
        if not data:
            raise ValueError(f"{name}: expected at least one batch, got an empty list")
        if isinstance(data[0], bool | int | float | complex | str):
            raise TypeError(
                f"{name}: expected a list of batches, got one of {type(data[0]).__name__}s. For "
                "numbers: functrain.ArrayLoader(np.asarray(data), batch_size)."
            )
        refuse_numbers(data[0], f"{name}: batch 0", (list,))
