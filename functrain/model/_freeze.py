"""Models of which a part is not trained."""

from typing import Any

import jax

from functrain.common import _patterns, _tree
from functrain.common._checks import require
from functrain.common._types import PyTree, StateT
from functrain.model._model import Model, ModelOutput


def freeze(model: Model, *patterns: str) -> Model:
    """Returns the model with some params frozen: part of `model_state`, where nothing trains them.

    No gradient is computed for them, no optimizer remembers anything of them.

    Args:
      model: Of linen, nnx, Keras, or written by hand. `cast` and `remat` go inside:
        ``freeze(cast(model), ...)``.
      *patterns: Over the paths of params, as for `warm_start`: ``*`` stands within one part of a
        path, ``**`` for any number of parts: ``freeze(model, "encoder/**", "**/bias")``.

    Returns:
      A model whose ``init`` gives params with None in the place of what is frozen, and model_state
      as ``{"frozen": params with None for the others, "model": the model's own}``. For params
      from elsewhere: `freeze` first, then `warm_start`, or ``params`` from ``init`` filled in. The
      way back is `merge_frozen`.

    Raises:
      ValueError: No pattern is given. From ``init``: a pattern means no param. From ``apply``:
        model_state is not that of a frozen model.

    Examples:
      >>> import jax, jax.numpy as jnp
      >>> def apply(params, model_state, x, *, rng=None, training=False):
      ...     return ModelOutput(params["a"] * x + params["b"], model_state)
      >>> model = Model(lambda key, x: ({"a": jnp.ones(()), "b": jnp.ones(())}, {}), apply)
      >>> frozen = freeze(model, "a")
      >>> params, model_state = frozen.init(jax.random.key(0), None)
      >>> print(params, model_state["frozen"])
      {'a': None, 'b': Array(1., dtype=float32)} {'a': Array(1., dtype=float32), 'b': None}
      >>> print(frozen.apply(params, model_state, 2.0).outputs)
      3.0
    """
    require(patterns, "patterns", 'one or more, such as "encoder/**"', patterns)

    def init(key: jax.Array, inputs: PyTree, /) -> tuple[PyTree, PyTree]:
        params, own = model.init(key, inputs)
        paths = [path for path, _ in _tree.leaves_with_path(params)]
        for pattern in patterns:
            _patterns.require_match("patterns", pattern, paths)
        frozen, trained = (_only(params, patterns, meant) for meant in (True, False))
        return trained, {"frozen": frozen, "model": own}

    def apply(params: PyTree, model_state: PyTree, inputs: PyTree, /, **mode: Any) -> ModelOutput:
        frozen, own = _parts(model_state)
        output = model.apply(_merged(params, frozen), own, inputs, **mode)
        return output._replace(model_state={"frozen": frozen, "model": output.model_state})

    return Model(init, apply)


def _only(params: PyTree, patterns: tuple[str, ...], meant: bool) -> PyTree:
    """Returns the params that patterns mean, or the others, with None for the rest."""

    def one(path: Any, leaf: PyTree) -> PyTree:
        return leaf if _patterns.any_matches(patterns, _tree.path_str(path)) is meant else None

    return jax.tree_util.tree_map_with_path(one, params)


def _merged(params: PyTree, frozen: PyTree) -> PyTree:
    return jax.tree.map(lambda a, b: b if a is None else a, params, frozen, is_leaf=_is_none)


def _parts(model_state: PyTree) -> tuple[PyTree, PyTree]:
    expected = "{'frozen': ..., 'model': ...}"
    advice = (
        "Create the state with the params and model_state that freeze(model, ...).init returns."
    )
    require(_has_frozen(model_state), "model_state", expected, model_state, advice)
    return model_state["frozen"], model_state["model"]


def _has_frozen(model_state: PyTree) -> bool:
    return isinstance(model_state, dict) and model_state.keys() == {"frozen", "model"}


def is_frozen(state: Any) -> bool:
    """Returns True if a state is that of a frozen model.

    Its `model_state` holds a second tree of params, and each param has a value in one of the two.
    """
    if not _has_frozen(state.model_state):
        return False
    trees = state.params, state.model_state["frozen"]
    flat: Any = [jax.tree.flatten(tree, is_leaf=_is_none) for tree in trees]
    (trained, structure), (frozen, other) = flat
    if structure != other:
        return False
    return all((a is None) != (b is None) for a, b in zip(trained, frozen, strict=True))


def _is_none(x: PyTree) -> bool:
    return x is None


def merge_frozen(state: StateT) -> StateT:
    """Returns a state of a frozen model as one of the model itself: all params, its model_state.

    Use it to evaluate, save or export, and to get a Keras model back:
    ``bridge.to_keras(ft.merge_frozen(state), keras_model)``. `opt_state` has slots for the trained
    params only: to train all of them, create a new state of these params and this model_state.

    Args:
      state: A TrainState, or anything with `params`, `model_state` and `replace`.

    Raises:
      ValueError: The state is not that of a frozen model.

    Examples:
      >>> import jax, jax.numpy as jnp, optax
      >>> from functrain import TrainState
      >>> model = Model(init=lambda key, x: ({"a": jnp.ones(2), "b": jnp.zeros(2)}, {}), apply=None)
      >>> params, model_state = freeze(model, "a").init(jax.random.key(0), None)
      >>> state = TrainState.create(params=params, model_state=model_state, tx=optax.sgd(0.1))
      >>> jax.tree.map(lambda x: float(x.sum()), merge_frozen(state).params)
      {'a': 2.0, 'b': 0.0}
    """
    whole: Any = state
    frozen, own = _parts(whole.model_state)
    unfrozen: StateT = whole.replace(params=_merged(whole.params, frozen), model_state=own)
    return unfrozen
