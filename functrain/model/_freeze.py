"""Models of which a part is not trained."""

import operator
from typing import Any, Protocol, Self, TypeVar

import jax

from functrain.common import _patterns, _tree
from functrain.common._types import PyTree
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
      way back is `unfreeze`.

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
    if not patterns:
        raise ValueError('patterns: expected one or more, such as "encoder/**", got none')

    def init(key: jax.Array, inputs: PyTree, /) -> tuple[PyTree, PyTree]:
        params, own = model.init(key, inputs)
        paths = [path for path, _ in _tree.leaves_with_path(params)]
        for pattern in patterns:
            if not any(_patterns.matches(pattern, path) for path in paths):
                raise ValueError(
                    f"patterns: expected paths of params, got {pattern!r}, which means none. Near "
                    f"it: {', '.join(_patterns.nearest(pattern, paths))}"
                )
        frozen, trained = (_only(params, patterns, meant) for meant in (True, False))
        return trained, {"frozen": frozen, "model": own}

    def apply(
        params: PyTree,
        model_state: PyTree,
        inputs: PyTree,
        /,
        *,
        rng: jax.Array | None = None,
        training: bool = False,
    ) -> ModelOutput:
        frozen, own = _parts(model_state)
        output = model.apply(_merged(params, frozen), own, inputs, rng=rng, training=training)
        return output._replace(model_state={"frozen": frozen, "model": output.model_state})

    return Model(init, apply)


def _only(params: PyTree, patterns: tuple[str, ...], meant: bool) -> PyTree:
    """Returns the params that patterns mean, or the others, with None for the rest."""

    def one(path: Any, leaf: PyTree) -> PyTree:
        return leaf if _patterns.any_matches(patterns, _tree.path_str(path)) is meant else None

    return jax.tree_util.tree_map_with_path(one, params)


def _merged(params: PyTree, frozen: PyTree) -> PyTree:
    return jax.tree.map(
        lambda a, b: b if a is None else a, params, frozen, is_leaf=lambda x: x is None
    )


def _parts(model_state: PyTree) -> tuple[PyTree, PyTree]:
    if not (isinstance(model_state, dict) and model_state.keys() == {"frozen", "model"}):
        raise ValueError(
            "model_state: expected {'frozen': ..., 'model': ...}, as the init of the frozen model "
            f"returns it, got {_tree.structure(model_state)}. Create the state with what "
            "freeze(model, ...).init returns, params and model_state both."
        )
    return model_state["frozen"], model_state["model"]


def is_frozen(state: Any) -> bool:
    """Returns True if a state is that of a frozen model.

    Its `model_state` holds a second tree of params, and each param has a value in one of the two.
    """
    model_state = state.model_state
    if not (isinstance(model_state, dict) and model_state.keys() == {"frozen", "model"}):
        return False
    trees = state.params, model_state["frozen"]
    is_none: Any = [jax.tree.map(lambda x: x is None, tree, is_leaf=_is_none) for tree in trees]
    if _tree.structure(is_none[0]) != _tree.structure(is_none[1]):
        return False
    return all(map(operator.ne, *map(jax.tree.leaves, is_none)))


def _is_none(x: PyTree) -> bool:
    return x is None


class Whole(Protocol):
    """What has `params` and `model_state`, such as a TrainState."""

    @property
    def params(self) -> PyTree:
        """What is trained."""

    @property
    def model_state(self) -> PyTree:
        """What is not."""

    def replace(self, **parts: Any) -> Self:
        """Returns it with other parts."""


WholeT = TypeVar("WholeT", bound=Whole)


def unfreeze(state: WholeT) -> WholeT:
    """Returns a state of a frozen model as one of the model itself: all params, its model_state.

    To take a Keras model home, ``bridge.to_keras(ft.unfreeze(state), keras_model)``; to evaluate,
    save or export it. `opt_state` knows of what was trained only: to train all of it, create a new
    state of these params and model_state.

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
      >>> print(sorted(jax.tree.map(float, jax.tree.map(jnp.sum, unfreeze(state).params)).items()))
      [('a', 2.0), ('b', 0.0)]
    """
    frozen, own = _parts(state.model_state)
    return state.replace(params=_merged(state.params, frozen), model_state=own)
