"""A Keras model as a functrain Model, and as a linen module."""

import inspect
import operator
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import keras

from bridge import keras_private
from bridge.model import _scope, _variables
from bridge.model._pure_layers import warn_of_python_layers
from functrain import Model, ModelOutput
from functrain.internal import PyTree, require, require_instance
from functrain.internal import tree as _tree


def from_keras(model: keras.Layer) -> Model:
    """Returns a Keras model as a pair of pure functions.

    The functions never change the variables of the model. They work under `jit`, `grad`, `vmap`,
    `scan`, `eval_shape` and `jax.checkpoint`.

    `init(key, inputs)` returns copies of the model's current values as nested dicts, whose keys are
    the names of layers and variables, as `summary` shows them; an unnamed layer in an attribute of
    a subclass has the name of the attribute. `params` has the trainable variables, `model_state`
    all others, among them the scales of float8 layers, which steps replace by their gradients.
    `key` and `inputs` are not used, since Keras has initialized the values already.

    `apply(params, model_state, inputs, *, rng=None, training=False)` computes
    ``model(inputs, training=training)``. Like `fit`, it leaves `training` out if the model's `call`
    does not take it. `losses` has the losses of `add_loss` and of regularizers, `f32[]` each. With
    ``rng=None`` dropout and other random layers draw from Keras's seed counters in `model_state`,
    which advance. With a key, the i-th SeedGenerator draws from ``fold_in(rng, i)`` in this
    application, and its counter is returned unchanged. Outputs keep Keras's masks; a loss that
    needs them must be called in the same trace. Updates of trainable variables in `call` are
    dropped, as in `fit`.

    Args:
      model: A built `keras.Model`, or any built layer. If layers are frozen later, `apply` raises
        ValueError for states created before. Steps that have been compiled do not notice this:
        create a new step after freezing layers.

    Returns:
      The model. Its `apply` raises ValueError if the state does not match the Keras model, if the
      model builds a layer that it had never called, or if it updates a variable that it does not
      track.

    Raises:
      TypeError: `model` is not a Keras layer.
      ValueError: `model` is not built.

    Examples:
      >>> import jax, jax.numpy as jnp, keras
      >>> net = keras.Sequential([keras.Input((3,)), keras.layers.Dense(2, name="out")])
      >>> model = from_keras(net)
      >>> params, model_state = model.init(jax.random.key(0), jnp.ones((4, 3)))
      >>> jax.tree.map(jnp.shape, params)
      {'out': {'bias': (2,), 'kernel': (3, 2)}}
      >>> jax.jit(model.apply)(params, model_state, jnp.ones((4, 3))).outputs.shape
      (4, 2)
    """
    require_built(model)
    warn_of_python_layers(model)

    def init(key: jax.Array, inputs: PyTree, /) -> tuple[PyTree, PyTree]:
        del key, inputs
        params, model_state = _variables.values(_variables.layout(model))
        return _tree.copy(params), _tree.copy(model_state)

    def apply(
        params: PyTree,
        model_state: PyTree,
        inputs: PyTree,
        /,
        *,
        rng: jax.Array | None = None,
        training: bool = False,
    ) -> ModelOutput:
        # Computed in every trace, since the model may have changed.
        layout = _variables.layout_of_state(model, params, model_state)
        pairs = _variables.pair(layout, params, model_state)
        # Later pairs replace those of the same variables before them.
        seeded_pairs = [] if rng is None else _seed_from_key(layout, rng)
        pairs += seeded_pairs
        # Not `stateless_call`: in Keras 3.15 it runs `call` instead of `__call__`. Then nested
        # layers do not get `training`, a bare layer gets neither autocast nor its activity
        # regularizer, and a layer that is used twice keeps the add_loss of one use only.
        with _scope.initialize_new_variables(), _scope.Scope(pairs) as scope:
            outputs, losses = _call(model, inputs, training)
        _variables.require_no_new_variables(layout, _variables.layout(model))
        scope.require_all_tracked(
            "the model updated variables that are in neither model.variables nor a layer's "
            "metrics, so their new values would be lost",
            "Use stateful=False in an RNN, pass keras.random a SeedGenerator that is an attribute "
            "of a layer, and create other variables by self.add_weight.",
        )
        seeded_ids = {id(variable) for variable, _ in seeded_pairs}
        new_state = {}
        for path, variable in layout.model_state.items():
            value = scope.get_current_value(variable)
            if id(variable) in seeded_ids:
                value = _variables.get_at(model_state, path)
            # An explicit dtype removes a weak type, which would change the carry of a scan.
            new_state[path] = jnp.asarray(value, dtype=value.dtype)
        return ModelOutput(outputs, _variables.nest(new_state), losses)

    return Model(init, apply)


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
            params, statistics = _variables.values(_variables.layout(self.model))
        scales = statistics.pop(_variables.OVERWRITTEN, {})
        initial = {"params": params, "batch_stats": statistics, _variables.OVERWRITTEN: scales}
        for collection, tree in initial.items():
            for key, value in tree.items():
                self.variable(collection, key, _tree.copy, value)
        values = _variables.from_collections(self.variables)
        out = from_keras(self.model).apply(*values, inputs, rng=self._rng(), training=training)
        # `init` returns the values before the first application.
        if not self.is_initializing():
            # In training a collection that is not mutable raises flax's error.
            if training or self.is_mutable_collection("batch_stats"):
                self._write({key: out.model_state[key] for key in statistics})
            for i, loss in enumerate(out.losses):
                self.sow("losses", f"loss_{i}", loss)
        return out.outputs

    def _rng(self) -> jax.Array | None:
        # `apply(..., rngs=key)` with a single key gives the stream "params".
        has_stream = self.has_rng("dropout") or self.has_rng("params")
        return self.make_rng("dropout") if has_stream and not self.is_initializing() else None

    def _write(self, statistics: PyTree) -> None:
        """Writes what has changed; the collection need not be mutable if nothing has."""
        for key, new in statistics.items():
            old: PyTree = self.get_variable("batch_stats", key)
            if any(map(operator.is_not, jax.tree.leaves(old), jax.tree.leaves(new))):
                self.put_variable("batch_stats", key, new)


def _call(
    model: keras.Layer, inputs: PyTree, training: bool
) -> tuple[PyTree, tuple[jax.Array, ...]]:
    # A step that failed in `fit` leaves its losses behind, which are tracers.
    keras_private.trainer.forget_losses(model)
    takes_training = "training" in inspect.signature(model.call).parameters
    outputs = model(inputs, training=training) if takes_training else model(inputs)
    # Scalars, in float32 or wider, as in Keras's trainer.
    return outputs, tuple(_tree.at_least_float32(jnp.sum(loss)) for loss in model.losses)


def _seed_from_key(layout: _variables.Layout, rng: jax.Array) -> list[tuple[Any, jax.Array]]:
    """Returns the pairs of seed counters and random bits, `u32[2]`, which differ for each."""
    pairs = []
    for i, variable in enumerate(layout.seeds):
        bits = jax.random.bits(jax.random.fold_in(rng, i), (2,), jnp.uint32)
        pairs.append((variable, bits))
    return pairs


def require_built(model: Any) -> None:
    """Raises TypeError unless `model` is a layer, and ValueError unless it is built."""
    advice = (
        "For flax use functrain.from_linen or functrain.from_nnx, and for a functrain.Model "
        "functrain.TrainState.create."
    )
    require_instance("model", model, keras.Layer, "a keras.Model or keras.Layer", advice)
    # `built` alone proves nothing: the `build` of a subclass can set it and leave the inner layers
    # unbuilt, which might still create variables.
    is_whole = model.variables or all(x.built for x in keras_private.layers.all_layers(model))
    advice = "Call it once on a batch, model(x), or model.build(input_shape)."
    require(model.built and is_whole, "model", "a built model with variables", model, advice)
