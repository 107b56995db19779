"""Values on the host, of arrays too whose parts several processes have."""

import pickle
from typing import Any

import jax
import numpy as np

from functrain.common._types import PyTree


def fetch_global(tree: PyTree) -> PyTree:
    """Fetches arrays as `jax.device_get` does; waits.

    Of what is divided over several processes all of it comes to each of them: all must ask for the
    same, in the same order.
    """
    return jax.device_get(jax.tree.map(_whole, tree))


def _whole(x: Any) -> Any:
    if not isinstance(x, jax.Array) or x.is_fully_addressable or x.is_fully_replicated:
        return x
    from jax.experimental import multihost_utils

    return multihost_utils.process_allgather(x, tiled=True)


def gather_from_processes(own: Any) -> list[Any]:
    """Returns what each process has of something small; all of them call it.

    It is pickled on the way, from one process of a run to another.
    """
    if jax.process_count() == 1:
        return [own]
    from jax.experimental import multihost_utils

    sent = np.frombuffer(pickle.dumps(own), np.uint8)
    sizes = multihost_utils.process_allgather(np.asarray(sent.size, np.int32))
    padded = np.zeros(1 << int(sizes.max()).bit_length(), np.uint8)  # few programs for all sizes
    padded[: sent.size] = sent
    found = multihost_utils.process_allgather(padded)
    return [pickle.loads(row[:size].tobytes()) for row, size in zip(found, sizes, strict=True)]
