"""A Keras model as a functrain Model, its variables as a TrainState, and the way back."""

import inspect
import warnings
from collections.abc import Mapping
from typing import Any, Literal, Protocol, TypeAlias

import jax
import jax.numpy as jnp
import keras
import optax

from bridge import _keras_private, _scope, _transfer, _variables
from bridge._constraints import keeps_constraints
from bridge._optimizers import made_of
from bridge._steps import KerasState, write_keras_state
from functrain import Model, ModelOutput, TrainState, _tree

PyTree: TypeAlias = Any


class HasVariables(Protocol):
    """Anything with `params` and `model_state`, such as a TrainState."""

    @property
    def params(self) -> PyTree:
        """The trainable variables."""

    @property
    def model_state(self) -> PyTree:
        """All other variables."""


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
    _require_built(model)

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
        return _apply(model, params, model_state, inputs, rng, training)

    return Model(init, apply)


def _apply(
    model: keras.Layer,
    params: PyTree,
    model_state: PyTree,
    inputs: PyTree,
    rng: jax.Array | None,
    training: bool,
) -> ModelOutput:
    where = _variables.layout(model)  # each time: the model may have changed since
    pairs = _variables.pair(where, params, model_state)
    kept = {} if rng is None else _variables.select(model_state, where.seeds)
    reseeded = [] if rng is None else _reseeded(where, rng)
    # Not `stateless_call`: in Keras 3.15 it runs `call` in place of `__call__`. So nested layers
    # do not see `training`, a bare layer gets neither autocast nor its activity regularizer, and
    # a layer used twice keeps the add_loss of one use only.
    with _scope.keep_whole(), _scope.Scope([*pairs, *reseeded]) as scope:
        outputs, losses = _call(model, inputs, training)
    _variables.require_same(where, _variables.layout(model))
    scope.require_no_strays()
    new = {path: scope.get_current_value(v) for path, v in where.model_state.items()} | kept
    return ModelOutput(outputs, _variables.nest({p: _strong(x) for p, x in new.items()}), losses)


def _call(
    model: keras.Layer, inputs: PyTree, training: bool
) -> tuple[PyTree, tuple[jax.Array, ...]]:
    _keras_private.forget_losses(model)
    takes_training = "training" in inspect.signature(model.call).parameters
    outputs = model(inputs, training=training) if takes_training else model(inputs)
    return outputs, tuple(_scalar(loss) for loss in model.losses)


def _scalar(loss: Any) -> jax.Array:
    """Returns a loss as `f32[]`, summed as Keras's trainer does."""
    total = jnp.sum(loss)
    return total.astype(jnp.promote_types(total.dtype, jnp.float32))


def _strong(x: Any) -> jax.Array:
    return jnp.asarray(x, dtype=x.dtype)  # a weak type would not fit a scan's carry


def _reseeded(where: _variables.Layout, rng: jax.Array) -> list[tuple[Any, jax.Array]]:
    """Returns every seed counter with random bits of its own, `u32[2]`."""
    return [
        (where.model_state[path], jax.random.bits(jax.random.fold_in(rng, i), (2,), jnp.uint32))
        for i, path in enumerate(where.seeds)
    ]


def create_state(
    model: keras.Layer,
    tx: optax.GradientTransformation,
    *,
    rng: jax.Array | None = None,
    optimizer: Literal["auto", "require", "new"] = "auto",
) -> TrainState:
    """Returns a Keras model's variables as a TrainState, for the first step or for going on.

    Args:
      model: A built `keras.Model` or layer. Its variables are copied, so that it stays alive when
        a program consumes the state.
      tx: The optimizer.
      rng: None to draw randomness from Keras's own seed counters, which live in `model_state` and
        move on; or a typed key `key[]`, from which every step reseeds every SeedGenerator.
      optimizer: Whether `opt_state` and `step` go on where the optimizer that the model was
        compiled with is now. "auto": if `tx` is ``bridge.optimizer(model.optimizer)``, native or
        not, or the `tx` of its OptaxOptimizer, and it has been built. "require": in any case, also
        where Keras's Adam, AdamW, Lion, RMSprop, Adagrad or Adadelta goes on as optax's. "new":
        never.

    Returns:
      A TrainState of nested dicts: `params` are the trainable variables (float32 masters under a
      mixed precision policy), `model_state` all others. Paths are the same for every instance of
      an architecture.

    Raises:
      TypeError: `model` is not a Keras layer, or `rng` not a single typed key.
      ValueError: `model` is not built; or what its optimizer remembers is required, and `tx` has
        another state.

    Examples:
      >>> import keras, optax
      >>> model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(2, name="out")])
      >>> state = create_state(model, optax.sgd(0.1))
      >>> state.params["out"]["kernel"].shape
      (3, 2)
    """
    _require_built(model)
    where = _variables.layout(model)
    params, model_state = _variables.values(where)
    state = TrainState.create(params=params, model_state=model_state, tx=tx, rng=rng)
    if optimizer == "require" or (optimizer == "auto" and _goes_on(tx, model)):
        try:
            opt_state, step = _transfer.taken(state.opt_state, model)
        except _transfer.UnfitError as error:
            raise ValueError(
                f"model: expected an optimizer that tx can go on from: {error}.\n"
                'To start anew: bridge.create_state(model, tx, optimizer="new").'
            ) from error
        state = state.replace(opt_state=opt_state, step=_tree.copy(step))
    _warn_of_constraints(where, state.opt_state)
    return state


def to_keras(
    state: HasVariables | KerasState | Mapping[str, PyTree],
    model: keras.Layer,
    *,
    optimizer: Literal["auto", "require", "leave"] = "auto",
) -> keras.Layer:
    """Writes a state back into the Keras model it came from, or another of its architecture.

    Every variable is copied, seed counters too; nothing is written where anything does not fit.
    From a KerasState the optimizer and the metrics are written too. From a TrainState the slots
    and the iterations of a compiled optimizer are, where they are known to mean the same: the
    state is that of `bridge.optimizer` of such an optimizer, native or not, or of the model's
    OptaxOptimizer, or of optax's adam, adamw, lion, rmsprop, adagrad or adadelta where Keras's
    has the same name.

    Args:
      state: A TrainState, or anything with `params` and `model_state`; or a KerasState; or the
        variables of `bridge.to_linen(model)`, a dict of collections.
      model: A built `keras.Model` or layer.
      optimizer: "auto" leaves an optimizer alone that the state does not fit, "require" raises,
        "leave" leaves it alone in any case. It is about states other than a KerasState.

    Returns:
      `model`.

    Raises:
      TypeError: `state` has no `params` or `model_state`, or is being traced; or `model` is not a
        Keras layer.
      ValueError: `model` is not built, or the state is not one of this architecture; the message
        names the leaves; or the optimizer is required, and `opt_state` does not fit it.

    Examples:
      >>> import jax, keras, numpy as np, optax
      >>> model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(2)])
      >>> state = create_state(model, optax.sgd(0.1))
      >>> state = state.replace(params=jax.tree.map(lambda p: 0 * p, state.params))
      >>> float(np.sum(to_keras(state, model)(np.ones((1, 3)))))
      0.0
    """
    if isinstance(state, keras.Layer):
        raise TypeError(
            f"the order is bridge.to_keras(state, model), got {type(state).__name__} and "
            f"{type(model).__name__}"
        )
    _require_built(model)
    if isinstance(state, KerasState):
        return write_keras_state(state, model)
    if isinstance(state, Mapping) and "params" in state:
        parts = (_plain(state.get(name, {})) for name in _variables.COLLECTIONS)
        where, params = _variables.layout(model), _plain(state["params"])
        _variables.assign(where, params, _variables.merge(*parts))
        return model
    if not (hasattr(state, "params") and hasattr(state, "model_state")):
        raise TypeError(
            "state: expected a TrainState, or anything with .params and .model_state, got "
            f"{type(state).__name__}. The order is bridge.to_keras(state, model)."
        )
    where = _variables.layout(model)
    _variables.pair(where, state.params, state.model_state)  # before an optimizer is built
    opt_state = getattr(state, "opt_state", ()) if optimizer != "leave" else ()
    _variables.require_values({"params": state.params, "opt_state": opt_state})
    slots = [] if optimizer == "leave" else _slots(state, model, optimizer == "require")
    _variables.assign(where, state.params, state.model_state)
    for variable, value in slots:
        variable.assign(value)
    return model


def _plain(tree: PyTree) -> PyTree:
    """Turns mappings, such as flax's FrozenDict, into dicts."""
    is_mapping = isinstance(tree, Mapping)
    return {key: _plain(value) for key, value in tree.items()} if is_mapping else tree


def _slots(state: Any, model: keras.Layer, required: bool) -> list[tuple[Any, jax.Array]]:
    """Returns copies to write into the variables of the model's optimizer."""
    try:
        opt_state, step = getattr(state, "opt_state", ()), getattr(state, "step", 0)
        pairs = _transfer.given(opt_state, model, step)
        return list(zip([v for v, _ in pairs], _tree.copy([x for _, x in pairs]), strict=True))
    except _transfer.UnfitError as error:
        if required:
            raise ValueError(
                f"opt_state: expected one for the optimizer of the model: {error}.\n"
                'To leave the optimizer alone: bridge.to_keras(state, model, optimizer="leave"). '
                "The model is unchanged."
            ) from error
        return []


def _goes_on(tx: Any, model: Any) -> bool:
    """Whether tx was made of the optimizer that the model was compiled with, and is built."""
    optimizer = getattr(model, "optimizer", None)
    if optimizer is None or not optimizer.built:
        return False
    inner = getattr(optimizer, "inner_optimizer", optimizer)
    return made_of(tx) is optimizer or getattr(inner, "tx", None) is tx


def _warn_of_constraints(where: _variables.Layout, opt_state: PyTree) -> None:
    held = ["/".join(path) for path, v in where.params.items() if v.constraint is not None]
    if held and not keeps_constraints(opt_state):
        warnings.warn(
            "These variables have constraints, which Keras's optimizers apply after an update and "
            f"optax does not:\n{_tree.bullets(held)}\n"
            "To train within them: tx = optax.chain(tx, bridge.constraints(model)), or "
            "bridge.optimizer(keras_optimizer, model=model).",
            stacklevel=3,
        )


def _require_built(model: Any) -> None:
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
