"""Batches of which each member has its own: other examples, or another order of the same."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from functrain.common import _repr, _tree
from functrain.common._checks import require, require_instance, require_no_problems
from functrain.common._types import PyTree
from functrain.data import _buffer
from functrain.data._loader import ArrayLoader, SeekableLoader


class Loader(SeekableLoader):
    """Puts the batches of some loaders, one a member, together: leaves `[N, B, ...]`.

    For ``functrain.population.step(step, data="per_member")``. Loaders of the same arrays with
    different seeds give each member its own order. Loaders of rows drawn with replacement make a
    bagged ensemble (Breiman, 1996). The loaders may also have unrelated data. Any position can be
    sought, as in `ArrayLoader`.

    Args:
      loaders: An `ArrayLoader` for each of the N members, of equally many examples in batches of
        one size. With `drop_remainder` they may differ by examples that are dropped.

    Raises:
      TypeError: One of them is no `ArrayLoader`.
      ValueError: There is none, or one differs from the first in number of batches, batch size,
        structure, shapes or dtypes.

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
        _require_alike(self.loaders)
        first = self.loaders[0]
        self.batch_size = first.batch_size
        self.drop_remainder = first.drop_remainder
        self.examples = min(loader.examples for loader in self.loaders)

    @property
    def dropped(self) -> int:
        """Examples of an epoch that are in none of its batches, of the member that loses most."""
        return max(loader.dropped for loader in self.loaders)

    def __repr__(self) -> str:
        return _repr.call(self, members=len(self.loaders), of=self.loaders[0])

    def batch(self, epoch: int, index: int) -> PyTree:
        """Returns one batch, leaves `[N, B, ...]`; the last may be smaller."""
        return _stacked([loader.batch(epoch, index) for loader in self.loaders], axis=0)

    def chunk(self, epoch: int, start: int, k: int) -> PyTree:
        """Returns the K full batches from number `start` on, leaves `[K, N, B, ...]`."""
        return _stacked([loader.chunk(epoch, start, k) for loader in self.loaders], axis=1)

    def shapes(self, examples: int) -> PyTree:
        """Returns the shapes and dtypes of a batch of so many examples a member."""
        return jax.tree.map(
            lambda x: jax.ShapeDtypeStruct((len(self.loaders), *x.shape), x.dtype),
            self.loaders[0].shapes(examples),
        )

    def fingerprint(self) -> dict[str, Any]:
        """Returns what tells these batches from others, for a run that goes on with them."""
        return {"data": "population.Loader", "of": [each.fingerprint() for each in self.loaders]}


def _stacked(parts: list[PyTree], axis: int) -> PyTree:
    def stack(*xs: Any) -> Any:
        if isinstance(xs[0], jax.Array):
            return jnp.stack(xs, axis)
        shape = xs[0].shape
        out = _buffer.empty((*shape[:axis], len(xs), *shape[axis:]), xs[0].dtype)
        return np.stack(xs, axis, out=out)

    return jax.tree.map(stack, *parts)


def _require_alike(loaders: Sequence[Any]) -> None:
    require(loaders, "loaders", "one for each member", loaders)
    first = loaders[0]
    advice = "Stack batches of anything else with numpy.stack, and pass them as an iterable."
    for i, loader in enumerate(loaders):
        name = f"loaders, for member {i}"
        require_instance(name, loader, ArrayLoader, "a functrain.ArrayLoader", advice)
        lines = _tree.spec_differences(_counts(first), _counts(loader))
        lines = lines or _tree.differences(first.shapes(1), loader.shapes(1))
        require_no_problems(
            name,
            lines,
            "batches as member 0 has them",
            "Where only examples differ, drop_remainder=True leaves out those that fill no batch.",
        )


def _counts(loader: ArrayLoader) -> dict[str, Any]:
    rest = {} if loader.drop_remainder else {"examples": loader.examples}
    return {
        "batch_size": loader.batch_size,
        "batches": len(loader),
        "drop_remainder": loader.drop_remainder,
        "placement": loader.placement,
        **rest,
    }
