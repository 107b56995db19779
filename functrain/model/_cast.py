"""Models that compute in a lower precision than their params have."""

import functools
from typing import Any

import jax
import jax.numpy as jnp

from functrain.common import _tree
from functrain.common._checks import require
from functrain.common._types import PyTree
from functrain.common._warnings import warn
from functrain.model._model import Model, ModelOutput, require_model
from functrain.rewrites._equations import avals, describe_user_line, product_dtypes, walk_equations


def cast(model: Model, dtype: Any = jnp.bfloat16) -> Model:
    """Returns the model in mixed precision: params keep their dtype, `apply` computes in `dtype`.

    `apply` casts params and floating-point inputs to `dtype`. It casts outputs and losses in half
    precision back to float32, so that the loss is computed in float32. It does not cast
    `model_state`, such as batch statistics. Gradients, optimizer state and checkpoints therefore
    have the same dtypes as without `cast`. If a layer widens its inputs, so that no product is in
    `dtype`, a warning names it.

    Args:
      model: A linen or nnx model whose layers have ``dtype=None``, an Equinox model, or a model
        written by hand that computes in the dtype of its params and inputs. `nnx.BatchNorm` keeps
        computing in float32, the dtype of its statistics, unless it is given
        ``dtype=jnp.bfloat16``. A Keras model has a dtype policy instead, which must be set before
        the model is built:
        ``keras.config.set_dtype_policy("mixed_bfloat16")``.
      dtype: The dtype to compute in. For float16, whose range is small, see `loss_scale`.

    Raises:
      TypeError: `model` is not a Model, or `dtype` is not a floating-point type.

    Examples:
      >>> import flax.linen as nn, jax, jax.numpy as jnp
      >>> from functrain import from_linen
      >>> model = cast(from_linen(nn.Dense(2)))
      >>> x = jnp.full((1, 3), 1.001)  # rounds to 1 in bfloat16
      >>> params, model_state = model.init(jax.random.key(0), x)
      >>> params["kernel"].dtype, model.apply(params, model_state, x).outputs.dtype
      (dtype('float32'), dtype('float32'))
    """
    require_model(model)
    is_float = jnp.issubdtype(jnp.dtype(dtype), jnp.floating)
    require(is_float, "dtype", "a floating-point type", dtype, error=TypeError)

    is_checked = False

    def apply(params: PyTree, model_state: PyTree, inputs: PyTree, /, **mode: Any) -> ModelOutput:
        nonlocal is_checked
        cast_leaf = functools.partial(_cast_if_float, dtype)
        params, inputs = jax.tree.map(cast_leaf, (params, inputs))
        leaves = jax.tree.leaves((params, inputs))
        if not is_checked and any(isinstance(x, jax.core.Tracer) for x in leaves):
            is_checked = True
            _warn_of_wide_products(model, dtype, params, model_state, inputs, mode)
        output = model.apply(params, model_state, inputs, **mode)
        outputs, losses = jax.tree.map(_widen_if_half, (output.outputs, output.losses))
        # A step is scanned over, so the dtypes of the state that it carries must not change.
        new_model_state = jax.tree.map(
            lambda x, old: jnp.asarray(x, jnp.result_type(old)), output.model_state, model_state
        )
        return ModelOutput(outputs, new_model_state, losses)

    return Model(model.init, apply)


def _warn_of_wide_products(
    model: Model, dtype: Any, params: PyTree, model_state: PyTree, inputs: PyTree, mode: Any
) -> None:
    """Warns if no product of the model has the dtype."""
    # A model that cannot be traced raises the same error in `apply`, which calls it again.
    try:
        apply = functools.partial(model.apply, **mode)
        jaxpr = jax.make_jaxpr(apply)(params, model_state, inputs)
    except Exception:
        return
    counts, name = product_dtypes(jaxpr), jnp.dtype(dtype).name
    if not counts or name in counts:
        return
    products = ", ".join(f"{count} in {wide}" for wide, count in counts.items())
    origin = ""
    for eqn, _, _ in walk_equations(jaxpr):
        dtypes = [str(aval.dtype) for aval in avals(eqn)]
        read, made = set(dtypes[: len(eqn.invars)]), set(dtypes[len(eqn.invars) :])
        if wide_dtypes := (made - read) & counts.keys():
            origin = f" {wide_dtypes.pop()} begins in {describe_user_line(eqn)}."
            break
    warn(
        f"cast: expected products in {name}, got {products}: the model widens its inputs.{origin} "
        f"Give that layer dtype=jnp.{name}, or write x.astype(params.dtype) in place of float32."
    )


def _cast_if_float(dtype: Any, x: Any) -> Any:
    x = jnp.asarray(x)
    return x.astype(dtype) if jnp.issubdtype(x.dtype, jnp.floating) else x


def _widen_if_half(x: Any) -> Any:
    """Returns a float of less than 32 bits as float32, and any other leaf unchanged."""
    # A model may return Python numbers among its outputs, which have no dtype.
    if not _tree.is_array(x):
        return x
    is_half = jnp.issubdtype(x.dtype, jnp.floating) and x.dtype.itemsize < 4
    return x.astype(jnp.float32) if is_half else x
