"""The platform that a program is compiled for: "cpu", "gpu" or "tpu"."""

import contextlib
import threading
from collections.abc import Iterator
from typing import Any

import jax

from functrain.common._types import PyTree

# The platform of the program that this thread traces. jax traces a function before it knows the
# devices, so a decision that depends on them, such as a rewrite, reads the platform from here.
_tracing = threading.local()


def current_platform() -> str:
    """Returns the platform of the program that is being traced, or else of the default device."""
    traced: str | None = getattr(_tracing, "platform", None)
    if traced is not None:
        return traced
    device = jax.config.jax_default_device  # type: ignore[attr-defined, unused-ignore]
    if device is None:
        return jax.default_backend()
    # A name, such as "cpu", is allowed as well.
    return device if isinstance(device, str) else str(device.platform)


@contextlib.contextmanager
def compiling_for(platform: str) -> Iterator[None]:
    """Context manager: what this thread traces is for devices of a platform."""
    before = getattr(_tracing, "platform", None)
    _tracing.platform = platform
    try:
        yield
    finally:
        _tracing.platform = before


def platform_of(tree: PyTree) -> str:
    """Returns the platform that a program of these arguments is compiled for.

    That of the first array, or shape, that has been put on certain devices. jax moves all others
    to the default device.
    """
    for leaf in jax.tree.leaves(tree):
        if isinstance(leaf, jax.core.Tracer) or not getattr(leaf, "committed", True):
            continue
        sharding = getattr(leaf, "sharding", None)
        # The sharding of a type, over an abstract mesh, has no devices.
        is_abstract = isinstance(getattr(sharding, "mesh", None), jax.sharding.AbstractMesh)
        if isinstance(sharding, jax.sharding.Sharding) and not is_abstract:
            device: Any = next(iter(sharding.device_set))
            return str(device.platform)
    return current_platform()
