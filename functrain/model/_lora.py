"""Models with frozen params, to some of which trained matrices of low rank are added (LoRA)."""

import math
from collections.abc import Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp

from functrain.common import _patterns, _tree
from functrain.common._checks import is_positive, require, require_integer, require_one_of
from functrain.common._types import PyTree
from functrain.model import _freeze
from functrain.model._adapters import quantize
from functrain.model._freeze import FrozenState
from functrain.model._model import Model, require_model
from functrain.model._split import join, split_by_patterns


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
      model: A linen, nnx, Equinox or Keras model, or one written by hand. Apply `cast` and `remat`
        first: ``lora(cast(model), ...)``. To start from pretrained params, pass
        ``Model(lambda key, x: (params, model_state), model.apply)``. They may have any dtypes; the
        sum with an adapter is rounded to that of the matrix.
      *patterns: Patterns of the paths of params to adapt, as for `freeze`. Vectors and integers
        among those that match are only frozen: ``lora(model, "encoder/**", rank=8)`` adapts all
        matrices of the encoder.
      rank: The number of columns of `a`, which is `[*inputs, rank]`, initialized as He uniform; `b`
        is `[rank, *outputs]`. Both are float32, or wider if the matrix is.
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
      matrix, the params of `train`, and None in place of other params. The model_state has the
      attributes `frozen`, the base, `model`, the model_state of the given model, and `lora_scale`,
      f32[], alpha / rank. `merge_frozen` adds the adapters to the base.

    Raises:
      TypeError: `model` is not a Model, or a pattern is not a text.
      ValueError: No pattern is given, or `rank`, `alpha` or `base_dtype` is invalid. From ``init``:
        a pattern matches no param, or no floating-point matrix that is not trained whole.

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
    _freeze.require_patterns(patterns)
    require_integer("rank", rank)
    is_valid = alpha is None or is_positive(alpha)
    require(is_valid, "alpha", "a positive number, or None for the rank", alpha)
    require_one_of("base_dtype", base_dtype, ("int8", None))
    train_patterns = _patterns.as_patterns("train", train)
    scale = 1.0 if alpha is None else alpha / rank

    def init(key: jax.Array, inputs: PyTree, /) -> tuple[PyTree, PyTree]:
        params, model_state = model.init(key, inputs)
        fully_trained, base = split_by_patterns(params, "train", train_patterns)
        adapters = _create_adapters(key, base, _adapted_paths(base, patterns), rank)
        if base_dtype is not None:
            base = join(base, adapters, lambda w, _: quantize(w, _first_output(w.shape)))
        trained = join(fully_trained, adapters)
        # An array, so that `merge_frozen` needs nothing but the state.
        return trained, FrozenState(base, model_state, jnp.asarray(scale, jnp.float32))

    return _freeze.frozen_model(model, init, is_factored=factored)


def _adapted_paths(base: PyTree, patterns: Sequence[str]) -> list[str]:
    """Returns the paths of the matrices that the patterns match.

    Raises:
      ValueError: A pattern matches no floating-point matrix.
    """
    matrices = [path for path, w in _tree.leaves_with_path(base) if _is_matrix(w)]
    for pattern in patterns:
        _patterns.require_match("patterns of floating-point matrices", pattern, matrices)
    return [path for path in matrices if _patterns.any_matches(patterns, path)]


def _is_matrix(x: Any) -> bool:
    return jnp.ndim(x) >= 2 and jnp.issubdtype(jnp.result_type(x), jnp.floating)


def _first_output(shape: Sequence[int]) -> int:
    """Returns the first axis of the outputs of a matrix with any number of axes.

    Examples:
      >>> [_first_output(shape) for shape in ((8, 4), (64, 4, 16), (4, 16, 64), (3, 3, 32, 64))]
      [1, 1, 2, 3]
    """
    axes = range(len(shape) - 1, 0, -1)
    return min(axes, key=lambda axis: math.prod(shape[:axis]) + math.prod(shape[axis:]))


def _create_adapters(key: jax.Array, base: PyTree, paths: Sequence[str], rank: int) -> PyTree:
    """Returns the adapters of the matrices at the given paths, and None for other params."""
    # Folded in twice: models fold small numbers into this key.
    key = jax.random.fold_in(jax.random.fold_in(key, 0x10AA), rank)

    def create(path: Any, w: Any) -> PyTree:
        name = _tree.path_str(path)
        if name not in paths:
            return None
        first_output = _first_output(w.shape)
        inputs, outputs = w.shape[:first_output], w.shape[first_output:]
        dtype = jax.eval_shape(_tree.at_least_float32, w).dtype
        key_of_matrix = jax.random.fold_in(key, paths.index(name))
        initializer = jax.nn.initializers.he_uniform()
        a = initializer(key_of_matrix, (math.prod(inputs), rank), dtype)
        return {"a": a.reshape(*inputs, rank), "b": jnp.zeros((rank, *outputs), dtype)}

    return jax.tree_util.tree_map_with_path(create, base)
