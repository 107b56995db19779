"""Models with frozen params."""

import re
from collections.abc import Collection
from typing import Any

import jax

from functrain.common import _patterns, _repr, _tree
from functrain.common._checks import require
from functrain.common._types import PyTree, StateT
from functrain.model._model import Model, ModelOutput, require_model

_MODEL_STATE_PATH = re.compile(r"((?:.*?/)?)model_state/([^/]+)(.*)")
_MERGED_PART = {"frozen": "params", "model": "model_state"}


def freeze(model: Model, *patterns: str) -> Model:
    """Returns the model with some params moved to `model_state`, where they are not trained.

    No gradient is computed for frozen params, and the optimizer holds no state for them. The rest
    of `model_state`, such as the statistics of batch normalization, is updated as before.

    Args:
      model: A linen, nnx or Keras model, or one written by hand. Apply `cast` and `remat` first:
        ``freeze(cast(model), ...)``.
      *patterns: Patterns of the paths of params to freeze, as for `warm_start`: ``*`` matches
        within one part of a path, ``**`` matches any number of parts. For example
        ``freeze(model, "encoder/**", "**/bias")``.

    Returns:
      A model whose ``init`` returns params with None in place of the frozen ones, and the
      model_state ``{"frozen": params with None for the trained ones, "model": model_state of the
      given model}``. To start from pretrained params, freeze
      ``Model(lambda key, x: (params, model_state), model.apply)``. `merge_frozen` undoes the split.

    Raises:
      TypeError: `model` is not a Model.
      ValueError: No pattern is given. From ``init``: a pattern matches no param. From ``apply``:
        `model_state` does not come from a frozen model.

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
    require_model(model)
    are_texts = bool(patterns) and all(isinstance(pattern, str) for pattern in patterns)
    require(are_texts, "patterns", 'one or more, such as "encoder/**"', patterns)

    def init(key: jax.Array, inputs: PyTree, /) -> tuple[PyTree, PyTree]:
        params, model_state = model.init(key, inputs)
        paths = list(dict(_tree.leaves_with_path(params)))
        for pattern in patterns:
            _patterns.require_match("patterns", pattern, paths)
        frozen = _select_params(params, patterns, is_match=True)
        trained = _select_params(params, patterns, is_match=False)
        return trained, {"frozen": frozen, "model": model_state}

    def apply(params: PyTree, model_state: PyTree, inputs: PyTree, /, **mode: Any) -> ModelOutput:
        frozen, inner_state = _split_model_state(model_state)
        # Gradients are taken with respect to `params` only, so the frozen params that are merged
        # in here cost no operation in the backward pass.
        output = model.apply(_merge_params(params, frozen), inner_state, inputs, **mode)
        return output._replace(model_state={"frozen": frozen, "model": output.model_state})

    return Model(init, apply)


def _select_params(params: PyTree, patterns: tuple[str, ...], *, is_match: bool) -> PyTree:
    """Returns the params that match a pattern, or those that do not, and None for the others."""

    def select(path: Any, leaf: PyTree) -> PyTree:
        # None is an empty subtree for jax, so that gradients and optimizers skip it.
        return leaf if _patterns.any_matches(patterns, _tree.path_str(path)) is is_match else None

    return jax.tree_util.tree_map_with_path(select, params)


def _merge_params(params: PyTree, frozen: PyTree) -> PyTree:
    return jax.tree.map(lambda a, b: b if a is None else a, params, frozen, is_leaf=_is_none)


def _split_model_state(model_state: PyTree) -> tuple[PyTree, PyTree]:
    """Returns the frozen params and the inner model's `model_state`.

    Raises:
      ValueError: `model_state` does not come from a frozen model.
    """
    expected = "{'frozen': ..., 'model': ...}"
    advice = (
        "Create the state with the params and model_state that freeze(model, ...).init returns."
    )
    require(has_frozen(model_state), "model_state", expected, model_state, advice)
    return model_state["frozen"], model_state["model"]


def has_frozen(model_state: PyTree) -> bool:
    """Returns True for the model_state of a frozen model."""
    return isinstance(model_state, dict) and model_state.keys() == {"frozen", "model"}


def has_base(model_state: PyTree) -> bool:
    """Returns True for the model_state of a model of `lora`."""
    return isinstance(model_state, dict) and model_state.keys() == {"frozen", "model", "lora_scale"}


def wrapped_state_advice(model_state: PyTree) -> str:
    """Returns advice if a model_state is that of `freeze` or `lora`, for errors of other models."""
    if has_base(model_state):
        wrapper, merge = "lora", "merge_lora"
    elif has_frozen(model_state):
        wrapper, merge = "freeze", "merge_frozen"
    else:
        return ""
    return (
        f"This model_state is that of a model of functrain.{wrapper}. Pass that model, as in "
        f"supervised({wrapper}(model, ...), loss), or the state functrain.{merge}(state)."
    )


def is_frozen(state: Any) -> bool:
    """Returns True if a state belongs to a frozen model.

    Its `model_state` then holds a second tree of params, and each param has a value in exactly one
    of the two trees.
    """
    if not has_frozen(state.model_state):
        return False
    # The keys alone prove nothing: a model may have layers that are called "frozen" and "model".
    trained, trained_structure = _flatten_with_none(state.params)
    frozen, frozen_structure = _flatten_with_none(state.model_state["frozen"])
    if trained_structure != frozen_structure:
        return False
    return all((a is None) != (b is None) for a, b in zip(trained, frozen, strict=True))


def merged_paths(paths: Collection[str], *, with_lora: bool = False) -> dict[str, str]:
    """Returns the paths that leaves have after `merge_frozen`, by their paths before it.

    Args:
      paths: Paths of the leaves of a state, or of a tree of states, frozen or not.
      with_lora: Whether the base of a model of `lora` gets the paths of the original params, too.
        It has their shapes, but not the values that `merge_lora` returns.
    """
    allowed = {*_MERGED_PART, "lora_scale"} if with_lora else {*_MERGED_PART}
    matches = [match for path in paths if (match := _MODEL_STATE_PATH.fullmatch(path))]
    parts: dict[str, set[str]] = {}  # what each model_state consists of
    for prefix, part, _ in (match.groups() for match in matches):
        parts.setdefault(prefix, set()).add(part)
    merged = dict(zip(paths, paths, strict=True))
    for match in matches:
        prefix, part, rest = match.groups()
        # A model that is not frozen may have layers called "frozen" and "model", too.
        is_split = "frozen" in parts[prefix] <= allowed and part in _MERGED_PART
        if is_split and (path := prefix + _MERGED_PART[part] + rest) not in merged:
            merged[match.string] = path
    return merged


def _flatten_with_none(tree: PyTree) -> tuple[list[Any], Any]:
    return jax.tree.flatten(tree, is_leaf=_is_none)


def _is_none(x: PyTree) -> bool:
    return x is None


def merge_frozen(state: StateT) -> StateT:
    """Returns the state of a frozen model as a state of the original model, with all params.

    Use it to write a Keras model back, ``bridge.to_keras(ft.merge_frozen(state), keras_model)``, or
    to evaluate, save or export the original model. `opt_state` still covers the trained params
    only: to train all params, create a new state from `params` and `model_state`.

    Args:
      state: A TrainState, or any object with `params`, `model_state` and `replace`.

    Raises:
      ValueError: The state does not belong to a frozen model.

    Examples:
      >>> import jax, jax.numpy as jnp, optax
      >>> from functrain import TrainState
      >>> model = Model(init=lambda key, x: ({"a": jnp.ones(2), "b": jnp.zeros(2)}, {}), apply=None)
      >>> params, model_state = freeze(model, "a").init(jax.random.key(0), None)
      >>> state = TrainState.create(params=params, model_state=model_state, tx=optax.sgd(0.1))
      >>> print(merge_frozen(state).params)
      {'a': Array([1., 1.], dtype=float32), 'b': Array([0., 0.], dtype=float32)}
    """
    frozen_state: Any = state
    model_state = getattr(state, "model_state", None)
    if not has_frozen(model_state):
        advice = "A state without frozen params has all its params already: use it as it is."
        if has_base(model_state):
            advice = "For the state of a model of lora, use functrain.merge_lora."
        raise ValueError(
            f"state: expected the state of a frozen model, got {_repr.state_repr(state)}. {advice}"
        )
    frozen, model_state = _split_model_state(model_state)
    params = _merge_params(frozen_state.params, frozen)
    merged: StateT = frozen_state.replace(params=params, model_state=model_state)
    return merged
