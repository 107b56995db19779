"""A Keras model as a functrain Model."""

import inspect
from typing import Any

import jax
import jax.numpy as jnp
import keras

from bridge import keras_private
from bridge.model import _scope, _variables
from bridge.model._pure_layers import warn_of_frozen
from functrain import Model, ModelOutput
from functrain.internal import PyTree, require_instance
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
    warn_of_frozen(model)

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
        if rng is not None:
            # Later pairs replace those of the same variables before them.
            pairs += _seed_from_key(layout, rng)
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
        new_state = {}
        for path, variable in layout.model_state.items():
            is_reseeded = rng is not None and path in layout.seeds
            value = scope.get_current_value(variable)
            value = _variables.get_at(model_state, path) if is_reseeded else value
            # An explicit dtype removes a weak type, which would change the carry of a scan.
            new_state[path] = jnp.asarray(value, dtype=value.dtype)
        return ModelOutput(outputs, _variables.nest(new_state), losses)

    return Model(init, apply)


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
    for i, path in enumerate(layout.seeds):
        bits = jax.random.bits(jax.random.fold_in(rng, i), (2,), jnp.uint32)
        pairs.append((layout.model_state[path], bits))
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
    if not (model.built and is_whole):
        raise ValueError(
            f"model: expected a built model, got {type(model).__name__} {model.name!r}, which has "
            "no variables yet. Call it once on a batch, model(x), or model.build(input_shape)."
        )
