"""Models with frozen params, to some of which trained matrices of low rank are added (LoRA)."""

import math
from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp

from functrain.common import _patterns, _repr, _tree
from functrain.common._checks import (
    is_positive,
    require,
    require_flags,
    require_integer,
    require_no_problems,
    require_one_of,
)
from functrain.common._types import PyTree, StateT
from functrain.model._factored import Adapter, apply_factored, merge
from functrain.model._freeze import has_base, has_frozen
from functrain.model._model import Model, ModelOutput, require_model


def lora(
    model: Model,
    *patterns: str,
    rank: int,
    train: str | Sequence[str] = (),
    alpha: float | None = None,
    base_dtype: Literal["int8"] | None = None,
    factored: bool = False,
) -> Model:
    """Returns the model with its params frozen and trained low-rank matrices added to some (LoRA).

    A matrix `w` that a pattern matches is replaced by ``w + alpha / rank * (a @ b)`` of the trained
    adapters `a` and `b`. Initially `b` is zero, so that the model computes what the given one does.
    Only the adapters, and the params of `train`, have gradients and optimizer state, and they are
    saved by themselves: ``ft.save(path, state.params)``. The other params of the given model, its
    base, are in `model_state`.

    An array with more than two axes is a matrix as well: its first axes count as inputs and the
    others as outputs, divided where the adapters are smallest, and where that is a tie, as late as
    possible. For example, the attention kernels `[features, heads, head_size]` are divided after
    the first axis, `[heads, head_size, features]` after the second, and those of convolutions,
    `[height, width, inputs, outputs]`, usually before the last.

    Every application of the model computes the sums anew, and its gradient that of each matrix, so
    that a step takes about as long as one that trains all params. See `factored`.

    Args:
      model: A linen, nnx or Keras model, or one written by hand. Apply `cast` and `remat` first:
        ``lora(cast(model), ...)``. To start from pretrained params, pass
        ``Model(lambda key, x: (params, model_state), model.apply)``. They may have any dtypes; the
        sum with an adapter is rounded to that of the matrix.
      *patterns: Patterns of the paths of params to adapt, as for `freeze`. Vectors and integers
        among those that match are only frozen: ``lora(model, "encoder/**", rank=8)`` adapts all
        matrices of the encoder.
      rank: The number of columns of `a`, at least 1 and at most the number of inputs or outputs of
        each matrix. `a` is `[*inputs, rank]`, initialized as He uniform; `b` is `[rank, *outputs]`.
        Both are float32, or wider if the matrix is.
      train: Patterns of the paths of params that are trained whole, without adapters, such as a new
        head: ``lora(model, "encoder/**", rank=8, train="head/**")``.
      alpha: The sum has the factor ``alpha / rank``. By default, alpha is the rank, as in Keras.
      base_dtype: "int8" stores each adapted matrix as a pair ``(values: i8[...], scale)``,
        rounded symmetrically, with one scale for each output in the dtype of the matrix. `apply`
        uses their product. None keeps the base as it is.
      factored: True computes products with an adapted matrix as ``x @ w + (x @ a) @ b``, without
        the sum. This saves the gradients of the matrices, up to a third of the time of a step, and
        in a population with a shared base a copy of each matrix for each member. Sums are still
        computed for matrices that are used in other ways: in convolutions and embeddings, and
        inside loops and `remat`. The masks that a Keras model attaches to its outputs are lost.

    Returns:
      A model whose ``init`` returns the adapters, ``{"a": ..., "b": ...}`` in place of each adapted
      matrix, the params of `train`, and None in place of other params. The model_state is
      ``{"frozen": the base, "model": model_state of the given model, "lora_scale": f32[], alpha /
      rank}``. `merge_lora` adds the adapters to the base.

    Raises:
      TypeError: `model` is not a Model.
      ValueError: No pattern is given, or `rank`, `alpha` or `base_dtype` is invalid. From ``init``:
        a pattern matches no param, or no floating-point matrix that is not trained whole; or a
        matrix is smaller than `rank`.
        From ``apply``: `model_state` does not come from a model of `lora`.

    References:
      Hu et al., LoRA: Low-rank adaptation of large language models, 2021
      (https://arxiv.org/abs/2106.09685).

    Examples:
      >>> import flax.linen as nn, jax, jax.numpy as jnp
      >>> from functrain import from_linen
      >>> model = from_linen(nn.Dense(32))
      >>> adapted = lora(model, "kernel", rank=2)
      >>> x = jnp.ones((1, 64))
      >>> params, model_state = adapted.init(jax.random.key(0), x)
      >>> jax.tree.map(jnp.shape, params)
      {'bias': None, 'kernel': {'a': (64, 2), 'b': (2, 32)}}
      >>> base, _ = model.init(jax.random.key(0), x)
      >>> outputs = adapted.apply(params, model_state, x).outputs
      >>> bool((outputs == model.apply(base, {}, x).outputs).all())
      True
    """
    require_model(model)
    are_texts = bool(patterns) and all(isinstance(pattern, str) for pattern in patterns)
    require(are_texts, "patterns", 'one or more, such as "encoder/**"', patterns)
    require_integer("rank", rank)
    is_valid = alpha is None or is_positive(alpha)
    require(is_valid, "alpha", "a positive number, or None for the rank", alpha)
    require_one_of("base_dtype", base_dtype, ("int8", None))
    require_flags(factored=factored)
    whole_patterns = [train] if isinstance(train, str) else train
    are_texts = isinstance(whole_patterns, Sequence) and all(
        isinstance(pattern, str) for pattern in whole_patterns
    )
    require(are_texts, "train", 'patterns, such as "head/**"', train)
    scale = 1.0 if alpha is None else alpha / rank

    def init(key: jax.Array, inputs: PyTree, /) -> tuple[PyTree, PyTree]:
        params, model_state = model.init(key, inputs)
        whole, base = _split_whole(params, whole_patterns)
        paths = _adapted_paths(base, patterns, rank)
        adapters = _create_adapters(key, base, paths, rank)
        if base_dtype is not None:
            base = _map_adapted(lambda adapter, w: _quantize(w), adapters, base)
        # Returned as an array, so that `merge_lora` needs nothing but the state.
        lora_scale = jnp.asarray(scale, jnp.float32)
        trained = jax.tree.map(_first_present, whole, adapters, is_leaf=_is_none)
        return trained, {"frozen": base, "model": model_state, "lora_scale": lora_scale}

    def apply(params: PyTree, model_state: PyTree, inputs: PyTree, /, **mode: Any) -> ModelOutput:
        expected = "{'frozen': ..., 'model': ..., 'lora_scale': ...}"
        advice = (
            "Create the state with the params and model_state that lora(model, ...).init returns."
        )
        require(has_base(model_state), "model_state", expected, model_state, advice)
        apply_base = _apply_factored if factored else _apply_merged
        output = apply_base(model, params, model_state, inputs, **mode)
        return output._replace(model_state={**model_state, "model": output.model_state})

    return Model(init, apply)


def merge_lora(state: StateT) -> StateT:
    """Returns the state of a model of `lora` as a state of the original model.

    Its params are those that `apply` used: the base with the adapters added, in the dtypes of the
    base, and without int8. Use it to write a Keras model back,
    ``bridge.to_keras(ft.merge_lora(state), keras_model)``, or to evaluate, save or export the
    original model. `opt_state` still belongs to the adapters: to train all params, create a new
    state from `params` and `model_state`.

    Args:
      state: A TrainState, or any object with `params`, `model_state` and `replace`.

    Raises:
      ValueError: The state does not belong to a model of `lora`, or its params are not those of
        the base.

    Examples:
      >>> import jax, jax.numpy as jnp, optax
      >>> from functrain import TrainState
      >>> model = Model(init=lambda key, x: ({"w": jnp.eye(2), "b": jnp.zeros(2)}, {}), apply=None)
      >>> params, model_state = lora(model, "w", rank=1).init(jax.random.key(0), None)
      >>> params["w"] = {"a": jnp.ones((2, 1)), "b": jnp.ones((1, 2))}
      >>> state = TrainState.create(params=params, model_state=model_state, tx=optax.sgd(0.1))
      >>> print(merge_lora(state).params["w"])
      [[2. 1.]
       [1. 2.]]
    """
    lora_state: Any = state
    model_state = getattr(state, "model_state", None)
    if not has_base(model_state):
        advice = "A state without adapters has all its params already: use it as it is."
        if has_frozen(model_state):
            advice = "For the state of a model of freeze, use functrain.merge_frozen."
        raise ValueError(
            "state: expected the state of a model of functrain.lora, got "
            f"{_repr.state_repr(state)}. {advice}"
        )
    params = _add_adapters(lora_state.params, lora_state.model_state)
    merged: StateT = lora_state.replace(params=params, model_state=lora_state.model_state["model"])
    return merged


def is_lora(state: Any) -> bool:
    """Returns True if a state belongs to a model of `lora`."""
    return has_base(state.model_state)


def _split_whole(params: PyTree, patterns: Sequence[str]) -> tuple[PyTree, PyTree]:
    """Returns the params that are trained whole, and the others, each with None for the rest.

    Raises:
      ValueError: A pattern matches no param.
    """
    paths = list(dict(_tree.leaves_with_path(params)))
    for pattern in patterns:
        _patterns.require_match("train", pattern, paths)

    def select(is_whole: bool) -> PyTree:
        def keep(path: Any, w: Any) -> Any:
            matches = _patterns.any_matches(patterns, _tree.path_str(path))
            return w if matches is is_whole else None

        return jax.tree_util.tree_map_with_path(keep, params)

    return select(True), select(False)


def _first_present(whole: Any, adapter: Any) -> Any:
    return adapter if whole is None else whole


def _is_none(x: Any) -> bool:
    return x is None


def _adapted_paths(base: PyTree, patterns: Sequence[str], rank: int) -> list[str]:
    """Returns the paths of the matrices that the patterns match.

    Raises:
      ValueError: A pattern matches no floating-point matrix, or a matrix is smaller than the rank.
    """
    leaves = dict(_tree.leaves_with_path(base))
    matrices = {path: w for path, w in leaves.items() if _is_matrix(w)}
    for pattern in patterns:
        _patterns.require_match("patterns", pattern, leaves)
        if not any(_patterns.matches(pattern, path) for path in matrices):
            others = [path for path in leaves if _patterns.matches(pattern, path)]
            lines = [f"{path}: {_tree.spec(leaves[path])}" for path in others]
            expected = f"a pattern of floating-point arrays with two axes or more for {pattern!r}"
            advice = "Integers and vectors are frozen, but have no adapters."
            require_no_problems("patterns", lines, expected, advice)
    adapted = {p: w for p, w in matrices.items() if _patterns.any_matches(patterns, p)}
    too_small = []
    for path, w in adapted.items():
        inputs, outputs = _sizes(w.shape, _first_output(w.shape))
        if rank > min(inputs, outputs):
            too_small.append(f"{path}: {_tree.spec(w)}, {inputs} inputs and {outputs} outputs")
    expected = f"matrices with at least {rank} inputs and outputs"
    advice = "Lower the rank, or do not match these arrays: they are small enough to train whole."
    require_no_problems("rank", too_small, expected, advice)
    return list(adapted)


def _is_matrix(x: Any) -> bool:
    return jnp.ndim(x) >= 2 and jnp.issubdtype(jnp.result_type(x), jnp.floating)


def _first_output(shape: Sequence[int]) -> int:
    """Returns the first axis of the outputs of a matrix with any number of axes.

    Examples:
      >>> [_first_output(shape) for shape in ((8, 4), (64, 4, 16), (4, 16, 64), (3, 3, 32, 64))]
      [1, 1, 2, 3]
    """
    axes = range(len(shape) - 1, 0, -1)
    return min(axes, key=lambda axis: sum(_sizes(shape, axis)))


def _sizes(shape: Sequence[int], first_output: int) -> tuple[int, int]:
    """Returns the numbers of inputs and outputs."""
    return math.prod(shape[:first_output]), math.prod(shape[first_output:])


def _create_adapters(key: jax.Array, base: PyTree, paths: Sequence[str], rank: int) -> PyTree:
    """Returns the adapters of the matrices at the given paths, and None for other params."""
    # Folded in twice: models fold small numbers into this key.
    key = jax.random.fold_in(jax.random.fold_in(key, 0x10AA), rank)

    def create(path: Any, w: Any) -> PyTree:
        if (name := _tree.path_str(path)) not in paths:
            return None
        first_output = _first_output(w.shape)
        inputs, _ = _sizes(w.shape, first_output)
        dtype = jax.eval_shape(_tree.at_least_float32, w).dtype
        initializer = jax.nn.initializers.he_uniform()
        a = initializer(jax.random.fold_in(key, paths.index(name)), (inputs, rank), dtype)
        b = jnp.zeros((rank, *w.shape[first_output:]), dtype)
        return {"a": a.reshape(*w.shape[:first_output], rank), "b": b}

    return jax.tree_util.tree_map_with_path(create, base)


class _Quantized(NamedTuple):
    """A matrix in int8.

    Attributes:
      values: `i8[...]`, with the shape of the matrix.
      scale: The factor of each output, in the dtype of the matrix.
    """

    values: jax.Array
    scale: jax.Array


def _map_adapted(function: Any, adapters: PyTree, base: PyTree) -> PyTree:
    """Returns all params: ``function(adapter, w)`` for adapted matrices, others as they are.

    A param that is trained whole is in `adapters`, and None in the base.
    """

    def apply(w: Any, adapter: Any) -> Any:
        if w is None or adapter is None:
            return adapter if w is None else w
        return function(adapter, w)

    return jax.tree.map(
        apply, base, adapters, is_leaf=lambda w: w is None or isinstance(w, _Quantized)
    )


def _quantize(w: Any) -> _Quantized:
    """Returns a matrix as int8 with one scale for each output, rounded symmetrically."""
    w = jnp.asarray(w)
    inputs = tuple(range(_first_output(w.shape)))
    wide = _tree.at_least_float32(w)
    exact = jnp.max(jnp.abs(wide), axis=inputs, keepdims=True) / 127
    scale = exact.astype(w.dtype)
    # Rounded up, because a weight must not be more than 127 times the scale, and float16 has few
    # digits for small numbers.
    is_below = _tree.at_least_float32(scale) < exact
    scale = jnp.where(is_below, jnp.nextafter(scale, jnp.full_like(scale, jnp.inf)), scale)
    # An output whose weights are all zero has the scale 1, by which they can be divided.
    scale = jnp.where(scale > 0, scale, jnp.ones_like(scale))
    # In half precision the quotients would be rounded as well, before they are rounded to integers.
    values = jnp.round(wide / _tree.at_least_float32(scale)).astype(jnp.int8)
    return _Quantized(values, scale)


def _dequantize(w: Any) -> jax.Array:
    if isinstance(w, _Quantized):
        w = w.values.astype(w.scale.dtype) * w.scale
    return jnp.asarray(w)


def _scaled(adapter: dict[str, jax.Array], model_state: PyTree) -> Adapter:
    a = adapter["a"]
    return Adapter(a * model_state["lora_scale"].astype(a.dtype), adapter["b"])


def _add_adapters(adapters: PyTree, model_state: PyTree) -> PyTree:
    """Returns the params of the original model."""

    def add(adapter: dict[str, jax.Array], w: Any) -> jax.Array:
        return merge(_dequantize(w), *_scaled(adapter, model_state))

    return _map_adapted(add, adapters, model_state["frozen"])


def _apply_merged(
    model: Model, adapters: PyTree, model_state: PyTree, inputs: PyTree, **mode: Any
) -> ModelOutput:
    params = _add_adapters(adapters, model_state)
    return model.apply(params, model_state["model"], inputs, **mode)


def _apply_factored(
    model: Model,
    adapters: PyTree,
    model_state: PyTree,
    inputs: PyTree,
    *,
    rng: jax.Array | None = None,
    **mode: Any,
) -> ModelOutput:
    leaves, structure = jax.tree.flatten(
        _map_adapted(
            lambda adapter, w: _Adapted(_dequantize(w), _scaled(adapter, model_state)),
            adapters,
            model_state["frozen"],
        ),
        is_leaf=lambda x: isinstance(x, _Adapted),
    )
    adapted = {i: x.adapter for i, x in enumerate(leaves) if isinstance(x, _Adapted)}
    leaves = [x.w if isinstance(x, _Adapted) else x for x in leaves]

    def apply(leaves: list[Any], state: PyTree, inputs: PyTree, rng: Any) -> ModelOutput:
        params = jax.tree.unflatten(structure, leaves)
        return model.apply(params, state, inputs, rng=rng, **mode)

    output: ModelOutput = apply_factored(apply, leaves, adapted, model_state["model"], inputs, rng)
    return output


class _Adapted(NamedTuple):
    """A matrix of the base and its adapter."""

    w: jax.Array
    adapter: Adapter
