"""Models that compute in another precision than they are kept in."""

from typing import Any

import jax
import jax.numpy as jnp

from functrain.common import _tree
from functrain.common._checks import require
from functrain.common._types import PyTree
from functrain.model._model import Model, ModelOutput


def cast(model: Model, dtype: Any = jnp.bfloat16) -> Model:
    """Returns the model in mixed precision: it keeps its params, and computes in another dtype.

    Params and floating-point inputs are cast to `dtype` on the way in. What comes out in half
    precision, outputs and losses, is cast to float32, so that the loss is computed in it.
    `model_state`, such as batch statistics, is kept and given as it is. So gradients, optimizer and
    checkpoints are what they are without it.

    Args:
      model: Of linen or nnx, with layers whose own `dtype` is None; or written by hand, so that it
        computes in the dtype of params and inputs. (`nnx.BatchNorm` goes on in float32, that of
        its statistics, unless it is given ``dtype=jnp.bfloat16``.) A Keras model has a policy for
        it, chosen before it is built: ``keras.config.set_dtype_policy("mixed_bfloat16")``.
      dtype: What to compute in. For float16, whose range is small, see `loss_scale`.

    Raises:
      TypeError: `dtype` is no floating-point type.

    Examples:
      >>> import flax.linen as nn, jax, jax.numpy as jnp
      >>> from functrain import from_linen
      >>> model = cast(from_linen(nn.Dense(2)))
      >>> x = jnp.full((1, 3), 1.001)  # 1 in bfloat16
      >>> params, model_state = model.init(jax.random.key(0), x)
      >>> params["kernel"].dtype, model.apply(params, model_state, x).outputs.dtype
      (dtype('float32'), dtype('float32'))
    """
    is_float = jnp.issubdtype(jnp.dtype(dtype), jnp.floating)
    require(is_float, "dtype", "a floating-point type", dtype, error=TypeError)

    def apply(params: PyTree, model_state: PyTree, inputs: PyTree, /, **mode: Any) -> ModelOutput:
        params, inputs = jax.tree.map(lambda x: _floats_to(dtype, x), (params, inputs))
        output = model.apply(params, model_state, inputs, **mode)
        outputs, losses = jax.tree.map(_widened, (output.outputs, output.losses))
        kept = jax.tree.map(_as, output.model_state, model_state)
        return ModelOutput(outputs, kept, losses)

    return Model(model.init, apply)


def _floats_to(dtype: Any, x: Any) -> Any:
    x = jnp.asarray(x)
    return x.astype(dtype) if jnp.issubdtype(x.dtype, jnp.floating) else x


def _as(x: Any, like: Any) -> Any:
    """Returns x in the dtype of another, either of which may be a Python number."""
    is_same = _tree.is_array(x) and _tree.is_array(like) and x.dtype == like.dtype
    return x if is_same else jnp.asarray(x, jnp.result_type(like))


def _widened(x: Any) -> Any:
    """Returns what is in half precision in float32, and anything else as it is."""
    if not _tree.is_array(x):
        return x
    half = jnp.issubdtype(x.dtype, jnp.floating) and x.dtype.itemsize < 4
    return x.astype(jnp.float32) if half else x
