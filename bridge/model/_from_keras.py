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
from functrain.internal import PyTree
from functrain.internal import tree as _tree


def from_keras(model: keras.Layer) -> Model:
    """Returns a Keras model as a pair of pure functions.

    Both see the model's architecture only: nothing they do changes its variables. They work under
    `jit`, `grad`, `vmap`, `scan`, `eval_shape` and `jax.checkpoint`.

    `init(key, inputs)` returns copies of the values that the model has at that time, as nested
    dicts that read like the model; Keras has initialized them already, so `key` and `inputs` are
    not used. `params` are the trainable variables, `model_state` all others.

    `apply(params, model_state, inputs, *, rng=None, training=False)` is
    ``model(inputs, training=training)``; `training` is left out where the model's `call` does not
    take it, as `fit` does. `losses` are those of `add_loss` and of regularizers, `f32[]` each.
    With `rng=None` dropout and the like draw from Keras's seed counters in `model_state`, which
    move on. With a key, the i-th SeedGenerator draws from ``fold_in(rng, i)`` for this
    application, and its counter comes back as it was passed. Outputs keep Keras's masks; a loss
    which needs them must be called in the same trace. Updates of trainable variables made in
    `call` are dropped, as `fit` drops them.

    Args:
      model: A built `keras.Model`, or any built layer. Layers may be frozen later; a state made
        before that is then refused. (A step that has been compiled is not looked at again: make a
        new one after freezing.)

    Returns:
      The pair. `apply` raises ValueError where the state does not fit the model, where the model
      builds a layer it never called before, and where it updates a variable it does not track.

    Raises:
      TypeError: `model` is not a Keras layer.
      ValueError: `model` is not built.

    Examples:
      >>> import jax, jax.numpy as jnp, keras
      >>> net = keras.Sequential([keras.Input((3,)), keras.layers.Dense(2)])
      >>> model = from_keras(net)
      >>> params, model_state = model.init(jax.random.key(0), jnp.ones((4, 3)))
      >>> jax.tree.map(jnp.shape, params)
      {'dense': {'bias': (2,), 'kernel': (3, 2)}}
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
        where = _variables.layout(model)  # each time: the model may have changed since
        pairs = _variables.pair(where, params, model_state)
        seeds, reseeded = ([], []) if rng is None else (where.seeds, _reseeded(where, rng))
        # Not `stateless_call`: in Keras 3.15 it runs `call` in place of `__call__`. So nested
        # layers do not see `training`, a bare layer gets neither autocast nor its activity
        # regularizer, and a layer used twice keeps the add_loss of one use only.
        with _scope.initialize_new_variables(), _scope.Scope([*pairs, *reseeded]) as scope:
            outputs, losses = _call(model, inputs, training)
        _variables.require_same(where, _variables.layout(model))
        scope.require_all_tracked(
            "the model updated variables that are in neither model.variables nor a layer's "
            "metrics, so their new values would be lost",
            "An RNN with stateful=True is one cause: use stateful=False, and pass the states "
            "(return_state=True, initial_state=...). keras.random without seed= is another: give "
            "it a keras.random.SeedGenerator held as an attribute. A variable of your own must be "
            "an attribute of its layer, best made by self.add_weight.",
        )
        new = {path: scope.get_current_value(v) for path, v in where.model_state.items()}
        new |= {path: _variables.at(model_state, path) for path in seeds}
        # A weak type would not fit a scan's carry.
        strong = {path: jnp.asarray(x, dtype=x.dtype) for path, x in new.items()}
        return ModelOutput(outputs, _variables.nest(strong), losses)

    return Model(init, apply)


def _call(
    model: keras.Layer, inputs: PyTree, training: bool
) -> tuple[PyTree, tuple[jax.Array, ...]]:
    keras_private.layers.forget_losses(model)
    takes_training = "training" in inspect.signature(model.call).parameters
    outputs = model(inputs, training=training) if takes_training else model(inputs)
    return outputs, tuple(_scalar(loss) for loss in model.losses)


def _scalar(loss: Any) -> jax.Array:
    """Returns a loss as `f32[]`, summed as Keras's trainer does."""
    total = jnp.sum(loss)
    return total.astype(jnp.promote_types(total.dtype, jnp.float32))


def _reseeded(where: _variables.Layout, rng: jax.Array) -> list[tuple[Any, jax.Array]]:
    """Returns every seed counter with random bits of its own, `u32[2]`."""
    return [
        (where.model_state[path], jax.random.bits(jax.random.fold_in(rng, i), (2,), jnp.uint32))
        for i, path in enumerate(where.seeds)
    ]


def require_built(model: Any) -> None:
    """Refuses what is no layer, or has no variables yet."""
    if not isinstance(model, keras.Layer):
        raise TypeError(
            f"model: expected a keras.Model or keras.Layer, got {type(model).__name__}. For flax "
            "use functrain.from_linen or functrain.from_nnx."
        )
    if not (model.built and _variables.has_state(model)):
        raise ValueError(
            f"model: expected a built model, got {type(model).__name__} {model.name!r}, which has "
            "no variables yet. Call it once on a batch, model(x), or model.build(input_shape)."
        )
