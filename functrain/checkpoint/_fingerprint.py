"""What equal bits depend on, apart from the program: software, devices, cores."""

import os
import platform
from importlib import metadata
from typing import Any

import jax

from functrain._version import __version__
from functrain.common._types import PyTree


def of_run(state: PyTree) -> dict[str, Any]:
    """Returns versions, devices and cores of this process, and the meshes of a state."""
    device, own = jax.devices()[0], getattr(os, "sched_getaffinity", None)
    shardings = (getattr(leaf, "sharding", None) for leaf in jax.tree.leaves(state))
    meshes = {str(dict(s.mesh.shape)) for s in shardings if isinstance(s, jax.NamedSharding)}
    return {
        "functrain": __version__,
        "jax": jax.__version__,
        "jaxlib": metadata.version("jaxlib"),
        "python": platform.python_version(),
        "platform": device.platform,
        "device": device.device_kind,
        "devices": jax.device_count(),
        "processes": jax.process_count(),
        "mesh": sorted(meshes),
        "cores": len(own(0)) if own is not None else os.cpu_count(),
    }


# Other versions of these give the same numbers.
_WITHOUT_EFFECT = ("functrain", "python")


def differences(saved: dict[str, Any], there: dict[str, Any]) -> list[str]:
    """Names what differs between two fingerprints, in words."""
    return [
        f"{name}: saved with {saved.get(name)}, now {there.get(name)}"
        for name in {**saved, **there}
        if name not in _WITHOUT_EFFECT and saved.get(name) != there.get(name)
    ]
