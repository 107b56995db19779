"""keras.distribution's layouts as functrain's rules, and rules as a distribution of Keras."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import keras
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import functrain as ft
from bridge import keras_private
from bridge.model import _variables
from bridge.model._from_keras import require_built
from functrain.internal import require_fitting_spec


class Placement(NamedTuple):
    """What `from_distribution` returns.

    Attributes:
      mesh: The devices.
      rule: Where each leaf of the model's state lies, for `functrain.sharding.put`.
      batch: Where a batch lies, for `functrain.fit(sharding=)`.

    Examples:
      >>> Placement._fields
      ('mesh', 'rule', 'batch')
    """

    mesh: Mesh
    rule: ft.sharding.Rule
    batch: NamedSharding


def from_distribution(distribution: Any, model: keras.Layer) -> Placement:
    """Returns where a distribution of Keras puts a model's state and its batches.

    Args:
      distribution: A `keras.distribution.DataParallel` or `ModelParallel`.
      model: A built model, under this distribution or under none.

    Returns:
      A mesh, a rule over the paths of the model's state (`bridge.create_state`), and a batch's
      sharding: for a loop of functrain that is to place all as Keras does.

    Raises:
      ValueError: `model` is not built.

    Examples:
      >>> import bridge, functrain as ft, keras, optax
      >>> model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(2)])
      >>> where = from_distribution(keras.distribution.DataParallel(), model)
      >>> state = bridge.create_state(model, optax.adam(1e-3))
      >>> state = ft.sharding.put(state, where.mesh, where.rule)
      >>> state.params["dense"]["kernel"].sharding.mesh == where.mesh
      True
    """
    require_built(model)
    variables = {"/".join(path): v for path, v in _variables.layout(model).variables().items()}

    def rule(path: str, x: Any, mesh: Any, /) -> PartitionSpec:
        layout = distribution.get_variable_layout(variables[path])
        sharding: NamedSharding = getattr(layout, "backend_layout", layout)
        return sharding.spec

    batch = distribution.get_data_layout((1,)).backend_layout
    return Placement(distribution.device_mesh.backend_mesh, rule, batch)


def to_distribution(mesh: Mesh, rule: ft.sharding.Rule, *, batch: str = "data") -> Any:
    """Returns a distribution of Keras that puts variables where a rule says.

    A model that is made while it is set lies there, slots of optimizers with their variables, and
    `bridge.fit`, like Keras's own `fit`, leaves it there. Unlike a LayoutMap it knows shapes, so
    that `functrain.sharding.fsdp` serves.

    Args:
      mesh: As of `functrain.sharding.mesh`, with automatic axes.
      rule: Asked about the paths of Keras's variables, such as ``sequential/dense/kernel``. Seeds,
        counts and other variables that it has nothing for are on all devices; a weight that is
        trained has to have a rule.
      batch: The axis over which examples are divided.

    Returns:
      A `keras.distribution.ModelParallel`, for `keras.distribution.set_distribution`.

    Raises:
      ValueError: The mesh has no such axis; later, as each variable is made: there is no rule for
        it, or the mesh does not divide it.

    Examples:
      >>> import functrain as ft, keras
      >>> mesh = ft.sharding.mesh({"data": -1})
      >>> with to_distribution(mesh, ft.sharding.fsdp(min_size=1)).scope():
      ...     model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(8)])
      >>> tuple(model.layers[0].kernel.value.sharding.spec)
      (None, 'data')
    """
    if batch not in mesh.shape:
        raise ValueError(f"batch: expected an axis of the mesh, {mesh.axis_names}, got {batch!r}")
    names = [f"{device.platform}:{device.id}" for device in mesh.devices.flat]
    devices = keras.distribution.DeviceMesh(mesh.devices.shape, mesh.axis_names, names)
    return _ByRule(devices, rule, batch)


class _ByRule(keras.distribution.ModelParallel):  # type: ignore[misc]  # keras has no types
    """What `to_distribution` returns."""

    def __init__(self, devices: Any, rule: ft.sharding.Rule, batch: str) -> None:
        super().__init__(layout_map=keras.distribution.LayoutMap(devices), batch_dim_name=batch)
        self.rule = rule
        self.asked: set[str] = set()

    def get_variable_layout(self, variable: Any) -> Any:
        """Returns where a variable is to lie."""
        known = keras_private.variables.layout(variable)
        if known is not None:
            return known
        mesh, spec = self.device_mesh.backend_mesh, PartitionSpec()
        if variable.shape and jnp.issubdtype(jnp.dtype(variable.dtype), jnp.inexact):
            spec = self._ask(variable, mesh)
        return NamedSharding(mesh, spec)

    def _ask(self, variable: Any, mesh: Mesh) -> PartitionSpec:
        leaf = jax.ShapeDtypeStruct(tuple(variable.shape), jnp.dtype(variable.dtype))
        self.asked.add(variable.path)
        try:
            spec = self.rule(variable.path, leaf, mesh)
        except ValueError:
            if variable.trainable:
                raise
            return PartitionSpec()
        require_fitting_spec(variable.path, leaf, spec, mesh)
        return spec


def require_use() -> None:
    """Refuses to train under a distribution of `to_distribution` whose patterns fit nothing.

    Raises:
      ValueError: It names them.
    """
    distribution = keras.distribution.distribution()
    if isinstance(distribution, _ByRule) and hasattr(distribution.rule, "require_use"):
        distribution.rule.require_use(distribution.asked)
