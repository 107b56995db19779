"""A loader with different batches for each member."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from functrain.common import _repr, _tree
from functrain.common._checks import require, require_instance, require_no_problems
from functrain.common._types import PyTree
from functrain.data._batches import SeekableLoader
from functrain.data._loader import ArrayLoader
from functrain.data._same_data import Summary
from functrain.data._stack import empty_aligned


class Loader(SeekableLoader):
    """Stacks the batches of several loaders, one for each member: leaves `[N, B, ...]`.

    For ``functrain.population.step(step, data="per_member")``. Loaders of the same arrays with
    different seeds give each member its own order. Loaders of rows drawn with replacement make a
    bagged ensemble (Breiman, 1996). The loaders may also have unrelated data. Any position can be
    sought, as in `ArrayLoader`.

    Args:
      loaders: An `ArrayLoader` for each of the N members, with the same number of examples, batch
        size, `drop_remainder` and `placement`. With `drop_remainder`, the numbers of examples that
        are dropped may differ.

    Raises:
      TypeError: One of them is not an `ArrayLoader`.
      ValueError: There are no loaders, or one differs from the first in one of these settings, or
        in the structure, shapes or dtypes of its batches.

    Examples:
      >>> import functrain as ft, numpy as np
      >>> x = np.arange(6)
      >>> loader = Loader([ft.ArrayLoader(x, 2, shuffle=True, seed=seed) for seed in range(3)])
      >>> len(loader), loader.batch(epoch=0, index=0).shape
      (3, (3, 2))
      >>> loader.chunk(epoch=0, start=0, k=2).shape
      (2, 3, 2)
    """

    def __init__(self, loaders: Sequence[ArrayLoader]) -> None:
        self.loaders = tuple(loaders)
        _require_same_batches(self.loaders)
        first = self.loaders[0]
        self.batch_size = first.batch_size
        self.drop_remainder = first.drop_remainder
        self.knows_shapes = all(loader.knows_shapes for loader in self.loaders)
        # Loaders that drop remainders may differ by the examples that are dropped.
        self.examples = min(loader.examples for loader in self.loaders)
        self.dropped = max(loader.dropped for loader in self.loaders)

    def __repr__(self) -> str:
        return _repr.call(self, members=len(self.loaders), of=self.loaders[0])

    def batch(self, epoch: int, index: int) -> PyTree:
        """Returns one batch, leaves `[N, B, ...]`; the last may be smaller."""
        return _stack_parts([loader.batch(epoch, index) for loader in self.loaders], axis=0)

    def chunk(self, epoch: int, start: int, k: int, pad_to: int | None = None) -> PyTree:
        """Returns the K batches from number `start` on, stacked: leaves `[K, N, B, ...]`.

        The last batch may be smaller: then K is 1. With `pad_to`, the result has so many rows.
        """
        parts = [loader.chunk(epoch, start, k, pad_to) for loader in self.loaders]
        # Axis 1: a fused program scans over axis 0, the steps.
        return _stack_parts(parts, axis=1)

    def shapes(self, examples: int) -> PyTree:
        """Returns the shapes and dtypes of a batch with this many examples for each member."""
        return jax.tree.map(
            lambda x: jax.ShapeDtypeStruct((len(self.loaders), *x.shape), x.dtype),
            self.loaders[0].shapes(examples),
        )

    def fingerprint(self) -> dict[str, Any]:
        """Returns a description of the data, which a resumed run compares with the saved one."""
        fingerprints = [loader.fingerprint() for loader in self.loaders]
        return {"data": "population.Loader", "of": fingerprints}

    def summary(self) -> Summary:
        """Returns a few numbers of each member's data."""
        return {
            f"member {i}: {path}": values
            for i, loader in enumerate(self.loaders)
            for path, values in loader.summary().items()
        }


def _stack_parts(parts: list[PyTree], axis: int) -> PyTree:
    def stack(*xs: Any) -> Any:
        # Loaders with placement="device" return jax arrays, which stay on their device.
        if isinstance(xs[0], jax.Array):
            return jnp.stack(xs, axis)
        # jax on CPU takes over aligned memory without copying it; NumPy's own may be unaligned.
        shape = xs[0].shape
        out = empty_aligned((*shape[:axis], len(xs), *shape[axis:]), xs[0].dtype)
        return np.stack(xs, axis, out=out)

    return jax.tree.map(stack, *parts)


def _require_same_batches(loaders: Sequence[Any]) -> None:
    """Raises an error unless all are loaders with batches like those of the first."""
    require(loaders, "loaders", "one for each member", loaders)
    for i, loader in enumerate(loaders):
        name = f"loaders, for member {i}"
        advice = "Stack batches of anything else with numpy.stack, and pass them as an iterable."
        require_instance(name, loader, ArrayLoader, "a functrain.ArrayLoader", advice)
        problems = _tree.spec_differences(_settings(loaders[0]), _settings(loader))
        problems = problems or _tree.differences(loaders[0].shapes(1), loader.shapes(1))
        advice = "With drop_remainder=True, only the number of dropped examples may differ."
        require_no_problems(name, problems, "batches like those of member 0", advice)


def _settings(loader: ArrayLoader) -> dict[str, Any]:
    """Returns the attributes in which all loaders must agree."""
    names = ("batch_size", "drop_remainder", "placement")
    settings = {name: getattr(loader, name) for name in names}
    # Dropped examples may differ in number.
    examples = {} if loader.drop_remainder else {"examples": loader.examples}
    return {**settings, "batches": len(loader), **examples}
