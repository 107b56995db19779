"""A Keras model as a linen module."""

from typing import Any

import flax.linen as nn
import jax
import keras

from bridge.model import _variables
from bridge.model._from_keras import from_keras
from functrain.internal import PyTree
from functrain.internal import tree as _tree


def to_linen(model: keras.Layer, *, name: str | None = None) -> nn.Module:
    """Returns a Keras model as a linen module, to be used alone or inside another.

    Its variables are the model's, under the same keys as in `bridge.create_state`: `params` are
    the trainable ones, `batch_stats` all others, frozen weights included, but for the counters of
    Keras's seed generators, which are in `seeds`. ``init`` returns copies of the values that the
    model has at that time; the key is not used. The Keras model itself never changes;
    ``bridge.to_keras(variables, model)`` writes variables back into it.

    ``__call__(inputs, training=False)``: inputs are one pytree. In training statistics move on, so
    that `batch_stats` must be mutable. Randomness comes from the rng stream `dropout` (or the
    only one there is); without rngs from the counters, and `seeds` must be mutable too. Without
    training what is not mutable stays as it is. The model's own losses are sown into the
    collection `losses`.

    Args:
      model: A built `keras.Model` or layer.
      name: Of the module, as linen has it.

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
    from_keras(model)  # its errors, now
    return KerasModule(model, name=name)


class KerasModule(nn.Module):
    """What `to_linen` returns."""

    model: Any

    @nn.compact
    def __call__(self, inputs: PyTree, training: bool = False) -> PyTree:
        """Runs the model."""
        collections = _variables.collections(self.model)
        params = collections.pop("params")
        values = {key: self.param(key, _copier(value)) for key, value in params.items()}
        held = [
            self.variable(name, key, _copier(value), None)
            for name, tree in collections.items()
            for key, value in tree.items()
        ]
        state = _variables.merge(*({v.name: v.value} for v in held))
        out = from_keras(self.model).apply(
            values, state, inputs, rng=self._rng(), training=training
        )
        if not self.is_initializing():
            for variable in held:
                if training or self.is_mutable_collection(variable.collection):
                    _write(variable, out.model_state)
            for i, loss in enumerate(out.losses):
                self.sow("losses", f"loss_{i}", loss)
        return out.outputs

    def _rng(self) -> jax.Array | None:
        streams = self.has_rng("dropout") or self.has_rng("params")  # a single key is "params"
        return self.make_rng("dropout") if streams and not self.is_initializing() else None


def _copier(value: PyTree) -> Any:
    return lambda key: _tree.copy(value)


def _write(variable: Any, state: PyTree) -> None:
    """Writes the leaves of a linen variable that have changed, for which it must be mutable."""
    old = variable.value
    new = jax.tree_util.tree_map_with_path(
        lambda path, _: _variables.at(state[variable.name], _tree.keys(path)), old
    )
    if any(a is not b for a, b in zip(jax.tree.leaves(old), jax.tree.leaves(new), strict=True)):
        variable.value = new
