"""Values on the host, of arrays too whose parts several processes have."""

from typing import Any

import jax

from functrain.common._types import PyTree


def whole_on_host(tree: PyTree) -> PyTree:
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
