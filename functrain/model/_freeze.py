"""Models with frozen params."""

import collections
import re
from collections.abc import Callable, Collection, Sequence
from typing import Any, NamedTuple

import jax

from functrain.common import _patterns
from functrain.common._checks import require
from functrain.common._types import PyTree, StateT
from functrain.model._adapters import Adapted, Quantized, add_adapters, apply_factored, dequantize
from functrain.model._model import Model, ModelOutput, require_model
from functrain.model._split import join, split_by_patterns

_MODEL_STATE_PATH = re.compile(r"((?:.*?/)?)model_state/([^/]+)(.*)")
_MERGED_PART = {"frozen": "params", "model": "model_state"}


class FrozenState(NamedTuple):
    """The model_state of a model of `freeze` or `lora`.

    Attributes:
      frozen: The params that are not trained, with None in place of the others.
      model: The model_state of the given model.
      lora_scale: `f32[]`, the factor of the adapters of `lora`; None for `freeze`.
    """

    frozen: PyTree
    model: PyTree
    lora_scale: jax.Array | None = None


def freeze(model: Model, *patterns: str) -> Model:
    """Returns the model with some params moved to `model_state`, where they are not trained.

    No gradient is computed for frozen params, and the optimizer holds no state for them. The rest
    of `model_state`, such as the statistics of batch normalization, is updated as before.

    Args:
      model: A linen, nnx, Equinox or Keras model, or one written by hand. Apply `cast` and `remat`
        first: ``freeze(cast(model), ...)``.
      *patterns: Patterns of the paths of params to freeze, as for `warm_start`: ``*`` matches
        within one part of a path, ``**`` matches any number of parts. For example
        ``freeze(model, "encoder/**", "**/bias")``.

    Returns:
      A model whose ``init`` returns params with None in place of the frozen ones, and a model_state
      whose attribute `frozen` has these, with None in place of the trained ones, and whose
      attribute `model` is the model_state of the given model. To start from pretrained params,
      freeze ``Model(lambda key, x: (params, model_state), model.apply)``. `merge_frozen` undoes the
      split.

    Raises:
      TypeError: `model` is not a Model, or a pattern is not a text.
      ValueError: No pattern is given. From ``init``: a pattern matches no param.

    Examples:
      >>> import jax, jax.numpy as jnp
      >>> def apply(params, model_state, x, *, rng=None, training=False):
      ...     return ModelOutput(params["a"] * x + params["b"], model_state)
      >>> model = Model(lambda key, x: ({"a": jnp.ones(()), "b": jnp.ones(())}, {}), apply)
      >>> frozen = freeze(model, "a")
      >>> params, model_state = frozen.init(jax.random.key(0), None)
      >>> print(params, model_state.frozen)
      {'a': None, 'b': Array(1., dtype=float32)} {'a': Array(1., dtype=float32), 'b': None}
      >>> print(frozen.apply(params, model_state, 2.0).outputs)
      3.0
    """
    require_model(model)
    require_patterns(patterns)

    def init(key: jax.Array, inputs: PyTree, /) -> tuple[PyTree, PyTree]:
        params, model_state = model.init(key, inputs)
        frozen, trained = split_by_patterns(params, "patterns", patterns)
        return trained, FrozenState(frozen, model_state)

    return frozen_model(model, init)


def frozen_model(
    model: Model,
    init: Callable[[jax.Array, PyTree], tuple[PyTree, PyTree]],
    *,
    is_factored: bool = False,
) -> Model:
    """Returns the model of an `init` whose model_state is a `FrozenState`.

    Args:
      model: The given model.
      init: As in `Model`.
      is_factored: True computes products with adapted matrices without their sums.
    """

    def apply(params: PyTree, model_state: PyTree, inputs: PyTree, /, **mode: Any) -> ModelOutput:
        # Traced arguments are positional; the others, such as `training`, decide what is traced.
        rng = mode.pop("rng", None)

        def run(params: PyTree, state: PyTree, inputs: PyTree, rng: Any) -> ModelOutput:
            return model.apply(params, state, inputs, rng=rng, **mode)

        # Gradients are taken with respect to `params` only, so the frozen params that are merged
        # in here cost no operation in the backward pass.
        adapted, args = _adapted_params(params, model_state), (model_state.model, inputs, rng)
        if is_factored:
            output: ModelOutput = apply_factored(run, adapted, *args)
        else:
            output = run(add_adapters(adapted), *args)
        return output._replace(model_state=model_state._replace(model=output.model_state))

    return Model(init, apply)


def _adapted_params(trained: PyTree, model_state: FrozenState) -> PyTree:
    """Returns the params of the original model, with `Adapted` in place of adapted matrices."""

    def adapt(w: Any, adapter: dict[str, jax.Array]) -> Adapted:
        a: Any = adapter["a"]
        scale: Any = model_state.lora_scale
        return Adapted(dequantize(w), a * scale.astype(a.dtype), adapter["b"])

    return join(model_state.frozen, trained, adapt, Quantized)


def require_patterns(patterns: Sequence[str]) -> None:
    """Raises an error unless there are patterns, all of them texts."""
    require(patterns, "patterns", 'one or more, such as "encoder/**"', patterns)
    _patterns.as_patterns("patterns", patterns)


def is_frozen(state: Any) -> bool:
    """Returns True for a state of a model of `freeze` or `lora`: `merge_frozen` makes it whole."""
    return isinstance(getattr(state, "model_state", None), FrozenState)


def merged_paths(paths: Collection[str], *, with_lora: bool = False) -> dict[str, str]:
    """Returns the paths that leaves have after `merge_frozen`, by their paths before it.

    Args:
      paths: Paths of the leaves of a state, or of a tree of states, frozen or not.
      with_lora: True gives the base of a model of `lora` the paths of the original params, too. It
        has their shapes, but not the values that `merge_frozen` returns.
    """
    allowed = {*_MERGED_PART, "lora_scale"} if with_lora else {*_MERGED_PART}
    matches = list(filter(None, map(_MODEL_STATE_PATH.fullmatch, paths)))
    # The parts of each model_state: one that is not frozen may have layers of these names, too.
    parts = collections.defaultdict(set)
    for match in matches:
        parts[match[1]].add(match[2])
    merged = dict(zip(paths, paths, strict=True))
    for match in matches:
        prefix, part, rest = match.groups()
        if part in _MERGED_PART and "frozen" in parts[prefix] <= allowed:
            path = prefix + _MERGED_PART[part] + rest
            if path not in merged:
                merged[match.string] = path
    return merged


def merge_frozen(state: StateT) -> StateT:
    """Returns the state of a model of `freeze` or `lora` as a state of the original model.

    Its params are those that `apply` used: the frozen and the trained ones, and for `lora` the base
    with the adapters added, in the dtypes of the base, and without int8. Use it to write a Keras
    model back, ``bridge.to_keras(ft.merge_frozen(state), keras_model)``, or to evaluate, save or
    export the original model. `opt_state` still belongs to the trained params only: to train all
    params, create a new state from `params` and `model_state`.

    Args:
      state: A TrainState, or any object with `params`, `model_state` and `replace`.

    Raises:
      ValueError: The state does not belong to such a model.

    Examples:
      >>> import jax, jax.numpy as jnp, optax
      >>> from functrain import TrainState
      >>> model = Model(init=lambda key, x: ({"a": jnp.ones(2), "b": jnp.zeros(2)}, {}), apply=None)
      >>> params, model_state = freeze(model, "a").init(jax.random.key(0), None)
      >>> state = TrainState.create(params=params, model_state=model_state, tx=optax.sgd(0.1))
      >>> print(merge_frozen(state).params)
      {'a': Array([1., 1.], dtype=float32), 'b': Array([0., 0.], dtype=float32)}
    """
    expected = "one of a model of freeze or lora"
    advice = "A state of another model has all its params: use it as it is."
    require(is_frozen(state), "state", expected, state, advice)
    frozen_state: Any = state
    model_state = frozen_state.model_state
    params = add_adapters(_adapted_params(frozen_state.params, model_state))
    merged: StateT = frozen_state.replace(params=params, model_state=model_state.model)
    return merged
