"""A Keras model as a linen module."""

import operator
from typing import Any

import flax.linen as nn
import jax
import keras

from bridge import keras_private
from bridge.model import _variables
from bridge.model._from_keras import from_keras
from functrain.internal import PyTree
from functrain.internal import tree as _tree


def to_linen(model: keras.Layer, *, name: str | None = None) -> nn.Module:
    """Returns a Keras model as a linen module, for use alone or inside another module.

    Its variables have the same keys as in `bridge.create_state`. `params` has the trainable
    variables, `_overwrite_with_gradient` the scales of float8 layers, and `batch_stats` all others,
    including frozen weights and the counters of Keras's seed generators. ``init``
    returns copies of the model's current values and does not use the key. The Keras model itself
    never changes; ``bridge.to_keras(variables, model)`` writes variables back into it.

    The module is called as ``module(inputs, training=False)``, where inputs are one pytree. In
    training statistics are updated, so that `batch_stats` must be mutable. Random layers draw from
    the rng stream `dropout`, or if there is none from `params`, to which flax gives a single key,
    ``rngs=key``. Without both they draw from the counters, which advance. Without training,
    collections that are not mutable stay unchanged. The model's losses are sown into the
    collection `losses`.

    Args:
      model: A built `keras.Model` or layer.
      name: The name of the linen module.

    Returns:
      A `flax.linen.Module`.

    Raises:
      TypeError: `model` is not a Keras layer.
      ValueError: `model` is not built.

    Examples:
      >>> import jax, keras, numpy as np
      >>> dropout = keras.layers.Dropout(0.5)
      >>> net = keras.Sequential([keras.Input((3,)), keras.layers.Dense(4, name="d"), dropout])
      >>> module = to_linen(net)
      >>> variables = module.init(jax.random.key(0), np.ones((1, 3)))
      >>> jax.tree.map(np.shape, variables["params"])
      {'d': {'bias': (4,), 'kernel': (3, 4)}}
      >>> rngs = {"dropout": jax.random.key(1)}
      >>> module.apply(variables, np.ones((2, 3)), training=True, rngs=rngs).shape
      (2, 4)
    """
    # Raises the errors about the model here instead of in the first call.
    from_keras(model)
    return KerasModule(model, name=name)


class KerasModule(nn.Module):
    """The linen module that `to_linen` returns."""

    model: Any

    @nn.compact
    def __call__(self, inputs: PyTree, training: bool = False) -> PyTree:
        """Runs the model."""
        # Initial values, from which nothing is computed if the module has variables.
        with keras_private.variables.outside_scopes():
            collections = _variables.collections(self.model)
        params = collections.pop("params")
        for key, value in params.items():
            params[key] = self.param(key, _copier(value))
        variables = []
        for collection, tree in collections.items():
            for key, value in tree.items():
                variables.append(self.variable(collection, key, _copier(value), None))
        state: dict[str, dict[str, PyTree]] = {}
        for variable in variables:
            state.setdefault(variable.collection, {})[variable.name] = variable.value
        out = from_keras(self.model).apply(
            params,
            _variables.from_collections(state),
            inputs,
            rng=self._rng(),
            training=training,
        )
        # `init` returns the values before the first application.
        if not self.is_initializing():
            for variable in variables:
                # The gradients of float8 scales are their new values.
                if variable.collection == _variables.OVERWRITTEN:
                    continue
                # In training a collection that is not mutable raises flax's error.
                if training or self.is_mutable_collection(variable.collection):
                    _write(variable, out.model_state[variable.name])
            for i, loss in enumerate(out.losses):
                self.sow("losses", f"loss_{i}", loss)
        return out.outputs

    def _rng(self) -> jax.Array | None:
        # `apply(..., rngs=key)` with a single key gives the stream "params".
        has_stream = self.has_rng("dropout") or self.has_rng("params")
        return self.make_rng("dropout") if has_stream and not self.is_initializing() else None


def _copier(value: PyTree) -> Any:
    """Returns an initializer that ignores the key and returns a copy of a value."""
    return lambda key: _tree.copy(value)


def _write(variable: Any, new: PyTree) -> None:
    """Assigns a new value to a linen variable, which need not be mutable if nothing changed."""
    if any(map(operator.is_not, jax.tree.leaves(variable.value), jax.tree.leaves(new))):
        variable.value = new
