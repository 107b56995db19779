"""Where batches come from: passes over any data."""

import inspect
import warnings
from collections.abc import Iterable, Iterator
from typing import Any, TypeAlias

import jax
import numpy as np

from functrain.common import _tree
from functrain.common._types import PyTree
from functrain.data._loader import ArrayLoader
from functrain.data._resuming import Place
from functrain.data._stacks import Spec, Stack, filled
from functrain.data._stream import StreamPass, stream


class ArrayPass:
    """A pass over an `ArrayLoader`: full batches are gathered K at a time."""

    def __init__(self, loader: ArrayLoader, epoch: int, batch: int) -> None:
        self._loader, self._epoch, self._next = loader, epoch, batch

    def _examples(self) -> int:
        whole = self._next < self._loader.full_batches
        return self._loader.batch_size if whole else self._loader.remainder

    def usual(self) -> tuple[Spec, PyTree] | None:
        """Returns what batches of full size are like."""
        return self._loader.batch_size, _specs_of(self._loader, self._loader.batch_size)

    def spec(self) -> Spec | None:
        """Returns the next batch's number of examples."""
        return self._examples() if self._next < len(self._loader) else None

    def peek(self) -> PyTree:
        """Returns the shapes of the next batch, which is not made yet."""
        return _specs_of(self._loader, self._examples())

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


Pass: TypeAlias = ArrayPass | StreamPass
"""`spec` and `peek` look at the next batch of a pass, `take` hands out batches."""


class Source:
    """Data that can be passed over.

    Args:
      data: An `ArrayLoader`, or an iterable of batches.
      name: Of the argument, for errors.

    Raises:
      TypeError: `data` is neither.
      ValueError: `data` is known to hold nothing.
    """

    def __init__(self, data: Any, name: str = "data") -> None:
        if not isinstance(data, ArrayLoader):
            _require_iterable(data, name)
        self.data = data
        self.name = name
        self._place: Place | None = None
        self._pass: Pass | None = None
        self._saved: dict[str, Any] | None = None

    @property
    def is_iterator(self) -> bool:
        """Whether it is gone after one pass."""
        return isinstance(self.data, Iterator)

    @property
    def can_seek(self) -> bool:
        """Whether any batch can be asked for at any time."""
        return isinstance(self.data, ArrayLoader)

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
        if self.can_seek:
            yield _specs_of(self.data, self.data.batch_size)
            if len(self.data) > self.data.full_batches:
                yield _specs_of(self.data, self.data.remainder)
        elif isinstance(self.data, list | tuple):
            for batch in (self.data[0], self.data[-1]):
                yield jax.tree.map(lambda x: x if hasattr(x, "shape") else np.asarray(x), batch)

    def begin(self, epoch: int, batch: int = 0) -> Pass:
        """Begins a pass, at the given batch of it; those before it are left out."""
        if self.can_seek:
            return ArrayPass(self.data, epoch, batch)
        saved, self._saved = self._saved, None
        self._pass = stream(self.data, self.name, epoch, batch, self._place, saved)
        return self._pass

    def fingerprint(self) -> dict[str, Any]:
        """Returns what tells these data from others, as far as they say."""
        if self.can_seek:
            names = ("examples", "batch_size", "shuffle", "seed", "drop_remainder")
            known = {name: getattr(self.data, name) for name in names}
            return {"data": "ArrayLoader", **known, "batch": _words(_specs_of(self.data, 1))}
        return {"data": type(self.data).__name__, "batches": self.steps}

    def watch(self) -> None:
        """Has the data asked where they are from now on, for `state`."""
        self._place = None if self.can_seek else Place(self.data)

    def state(self, over: bool) -> dict[str, Any] | None:
        """Returns where the data are, if they have to be asked; None where that is known.

        Args:
          over: Whether the pass is over.
        """
        return self._pass.state(over) if isinstance(self._pass, StreamPass) else None

    def restore(self, state: dict[str, Any] | None, batch: int) -> None:
        """Has the next pass go on where `state` was returned.

        Args:
          state: What it returned.
          batch: Number of the batch the pass will begin at.
        """
        self._saved = state
        if (
            state is None
            and batch
            and not self.can_seek
            and not isinstance(self.data, list | tuple)
        ):
            warnings.warn(
                f"{self.name}: a {type(self.data).__name__} does not say where it is. Its first "
                f"{batch} batches are fetched again and left out; those after them are the same "
                "only if it gives the same batches each time.",
                stacklevel=2,
            )


def _specs_of(loader: ArrayLoader, examples: int) -> PyTree:
    return jax.tree.map(
        lambda x: jax.ShapeDtypeStruct((examples, *x.shape[1:]), x.dtype), loader.data
    )


def _words(batch: PyTree) -> dict[str, str]:
    return {path: _tree.strong_spec(x) for path, x in _tree.leaves_with_path(batch)}


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
            f"{type(data).__name__}. For arrays: functrain.ArrayLoader((x, y), batch_size)."
        )
    if isinstance(data, list | tuple):
        if not data:
            raise ValueError(f"{name}: expected at least one batch, got an empty list")
        if isinstance(data[0], bool | int | float | complex | str):
            raise TypeError(
                f"{name}: expected a list of batches, got one of {type(data[0]).__name__}s. For "
                "numbers: functrain.ArrayLoader(np.asarray(data), batch_size)."
            )
