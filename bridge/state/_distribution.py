"""Conversions between keras.distribution's layouts and functrain's sharding rules."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import keras
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import functrain as ft
from bridge import keras_private
from bridge.model import _variables
from bridge.model._from_keras import require_built
from functrain.internal import require, require_fitting_spec


class Placement(NamedTuple):
    """The placement of a model's state and its batches, which `from_distribution` returns.

    Attributes:
      mesh: The devices.
      rule: Gives the sharding of each leaf of the model's state, for `functrain.sharding.put`.
      batch: The sharding of a batch, for `functrain.fit(sharding=)`.

    Examples:
      >>> Placement._fields
      ('mesh', 'rule', 'batch')
    """

    mesh: Mesh
    rule: ft.sharding.Rule
    batch: NamedSharding


def from_distribution(distribution: Any, model: keras.Layer) -> Placement:
    """Returns the shardings that a Keras distribution gives a model's state and its batches.

    Args:
      distribution: A `keras.distribution.DataParallel` or `ModelParallel`.
      model: A built model, made under this distribution or under none.

    Returns:
      A mesh, a rule over the paths of the model's state (`bridge.create_state`), and a batch's
      sharding. With them a loop of functrain places arrays as Keras does.

    Raises:
      ValueError: `model` is not built.

    Examples:
      >>> import bridge, functrain as ft, keras, optax
      >>> model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(2, name="a")])
      >>> placement = from_distribution(keras.distribution.DataParallel(), model)
      >>> state = bridge.create_state(model, optax.adam(1e-3))
      >>> state = ft.sharding.put(state, placement.mesh, placement.rule)
      >>> state.params["a"]["kernel"].sharding.mesh == placement.mesh
      True
    """
    require_built(model)
    # The rule gets paths of the state, and Keras's layouts belong to variables.
    variables = {"/".join(path): v for path, v in _variables.layout(model).variables().items()}

    def rule(path: str, x: Any, mesh: Any, /) -> PartitionSpec:
        layout = distribution.get_variable_layout(variables[path])
        # Keras's own distributions return a TensorLayout, `to_distribution` a NamedSharding.
        sharding: NamedSharding = getattr(layout, "backend_layout", layout)
        return sharding.spec

    # Keras divides a batch along its first axis only, so any shape shows the layout.
    batch = distribution.get_data_layout((1,)).backend_layout
    return Placement(distribution.device_mesh.backend_mesh, rule, batch)


def to_distribution(mesh: Mesh, rule: ft.sharding.Rule, *, batch: str = "data") -> Any:
    """Returns a Keras distribution that shards variables by a rule.

    A model that is made while the distribution is set has its variables sharded, and the slots of
    its optimizer with them; `bridge.fit`, like Keras's own `fit`, leaves them so. Unlike a
    LayoutMap it passes shapes to the rule, so that `functrain.sharding.fsdp` can be used.

    Args:
      mesh: A mesh with automatic axes, such as that of `functrain.sharding.mesh`.
      rule: Called with the paths of Keras's variables, such as ``sequential/dense/kernel``. A
        weight that is trained must have a rule. Seeds, counters and other variables without a
        rule are replicated on all devices.
      batch: The axis of the mesh over which examples are divided.

    Returns:
      A `keras.distribution.ModelParallel`, for `keras.distribution.set_distribution`.

    Raises:
      ValueError: The mesh has no such axis; later, when a variable is made: the rule has nothing
        for it, or the mesh does not divide it.

    Examples:
      >>> import functrain as ft, keras
      >>> mesh = ft.sharding.mesh({"data": -1})
      >>> with to_distribution(mesh, ft.sharding.fsdp(min_size=1)).scope():
      ...     model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(8)])
      >>> tuple(model.layers[0].kernel.value.sharding.spec)
      (None, 'data')
    """
    require(batch in mesh.shape, "batch", f"an axis of the mesh, {mesh.axis_names}", batch)
    # Keras names devices by platform and id.
    names = [f"{device.platform}:{device.id}" for device in mesh.devices.flat]
    devices = keras.distribution.DeviceMesh(mesh.devices.shape, mesh.axis_names, names)
    return _ByRule(devices, rule, batch)


class _ByRule(keras.distribution.ModelParallel):  # type: ignore[misc]  # keras has no types
    """A distribution that calls a rule for each variable, with its path and shape."""

    def __init__(self, devices: Any, rule: ft.sharding.Rule, batch: str) -> None:
        super().__init__(layout_map=keras.distribution.LayoutMap(devices), batch_dim_name=batch)
        self.rule = rule
        # Paths of the variables for which the rule was called, to name patterns that match none.
        self.ruled_paths: set[str] = set()

    def get_variable_layout(self, variable: Any) -> Any:
        """Returns the layout of a variable."""
        # A slot of an optimizer is made with the layout of its variable, and its path has no rule.
        layout = keras_private.variables.layout(variable)
        if layout is not None:
            return layout
        mesh, spec = self.device_mesh.backend_mesh, PartitionSpec()
        # Scalars, seeds and counters stay on all devices.
        if variable.shape and jnp.issubdtype(jnp.dtype(variable.dtype), jnp.inexact):
            spec = self._spec(variable, mesh)
        return NamedSharding(mesh, spec)

    def _spec(self, variable: Any, mesh: Mesh) -> PartitionSpec:
        """Returns the rule's spec for a variable; replicated if it is not trained and has none."""
        leaf = jax.ShapeDtypeStruct(tuple(variable.shape), jnp.dtype(variable.dtype))
        self.ruled_paths.add(variable.path)
        # A rule raises for a path that none of its patterns matches. Moving averages and other
        # variables that are not trained may do without one.
        try:
            spec = self.rule(variable.path, leaf, mesh)
        except ValueError:
            if variable.trainable:
                raise
            return PartitionSpec()
        require_fitting_spec(variable.path, leaf, spec, mesh)
        return spec


def require_use() -> None:
    """Raises ValueError if the distribution's rule has patterns that match no variable.

    Concerns distributions of `to_distribution`; the message names the patterns.
    """
    distribution = keras.distribution.distribution()
    # A rule that is a plain function has no patterns to check.
    if isinstance(distribution, _ByRule) and hasattr(distribution.rule, "require_use"):
        distribution.rule.require_use(distribution.ruled_paths)
