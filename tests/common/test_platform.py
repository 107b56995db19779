"""The platform of a program follows from where its arguments are."""

import threading
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractMesh, NamedSharding, SingleDeviceSharding
from jax.sharding import PartitionSpec as P

from functrain.common._platform import compiling_for, current_platform, platform_of


def test_without_a_program_it_is_that_of_the_default_device() -> None:
    assert current_platform() == "cpu"
    with jax.default_device(jax.devices()[1]):
        assert current_platform() == "cpu"
    with jax.default_device("cpu"):
        assert current_platform() == "cpu"


def test_a_program_that_is_traced_has_its_own_until_it_ends() -> None:
    with compiling_for("tpu"):
        assert current_platform() == "tpu"
        with compiling_for("gpu"):
            assert current_platform() == "gpu"
        assert current_platform() == "tpu"
    assert current_platform() == "cpu"


def test_other_threads_have_another() -> None:
    seen = []
    with compiling_for("tpu"):
        thread = threading.Thread(target=lambda: seen.append(current_platform()))
        thread.start()
        thread.join()
    assert seen == ["cpu"]


class Elsewhere:
    """A leaf that has been put on a device of another platform."""

    committed = True

    def __init__(self, monkeypatch: Any) -> None:
        self.sharding = SingleDeviceSharding(jax.devices()[0])
        device = type("Device", (), {"platform": "tpu"})()
        monkeypatch.setattr(type(self.sharding), "device_set", {device})


def test_what_was_put_on_a_device_decides(monkeypatch: pytest.MonkeyPatch) -> None:
    put = jax.device_put(jnp.ones(2), jax.devices()[1])
    free = jnp.ones(2)
    with compiling_for("gpu"):
        assert platform_of([free, np.ones(2), 3]) == "gpu", "jax moves these anywhere"
        assert platform_of([free, put]) == "cpu"
        assert platform_of(jax.ShapeDtypeStruct((2,), jnp.float32)) == "gpu"
        assert platform_of(jax.ShapeDtypeStruct((2,), jnp.float32, sharding=put.sharding)) == "cpu"
        assert platform_of({}) == "gpu"
    leaf = Elsewhere(monkeypatch)
    assert platform_of([free, leaf]) == "tpu"


def test_tracers_and_abstract_meshes_have_no_devices() -> None:
    mesh = AbstractMesh((2,), ("data",))
    shape = jax.ShapeDtypeStruct((2,), jnp.float32, sharding=NamedSharding(mesh, P("data")))
    put = jax.device_put(jnp.ones(2), jax.devices()[1])
    seen = []
    with compiling_for("gpu"):
        assert platform_of(shape) == "gpu"
        jax.make_jaxpr(lambda x: seen.append(platform_of(x)))(put)
    assert seen == ["gpu"]
