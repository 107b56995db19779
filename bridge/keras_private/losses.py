"""What `compile` makes of a loss, and a loss before its mean is taken."""

import functools
import operator
from typing import Any

import keras
from keras.src.backend.common.masking import get_keras_mask
from keras.src.losses.loss import apply_mask, squeeze_or_expand_to_same_rank
from keras.src.trainers import compile_utils


def get_loss(identifier: Any, y: Any, outputs: Any) -> Any:
    """Returns the `keras.losses.Loss` that `compile` makes of a name, a function or a loss.

    Calls `compile_utils.get_loss`; checked with Keras 3.15.1. Without it there is no class to
    wrap a function in, and "crossentropy" means nothing.
    """
    return compile_utils.get_loss(identifier, y, outputs)


def losses_and_weight(loss: Any, y: Any, outputs: Any, sample_weight: Any) -> tuple[Any, Any, Any]:
    """Returns the values and the weight that `Loss.__call__` reduces, and how many are valid.

    The weight may be None. The number is None if there is no mask, and all values are valid.

    Calls `losses.loss.apply_mask`, `squeeze_or_expand_to_same_rank` and `get_keras_mask`; checked
    with Keras 3.15.1. With `reduction=None` Keras leaves out the factor that makes the mean one
    over valid elements, so without this the values of examples do not add up to the loss.
    """
    # As in Keras, the mask is read first: a conversion to another dtype makes an array without it.
    output_mask = get_keras_mask(outputs)
    with keras.name_scope(loss.name):
        y, outputs = keras.tree.map_structure(
            lambda x: keras.ops.convert_to_tensor(x, dtype=loss.dtype), (y, outputs)
        )
        values = loss.call(y, outputs)
        masks = [mask for mask in (output_mask, get_keras_mask(values)) if mask is not None]
        values = keras.ops.convert_to_tensor(values, dtype=loss.dtype)
        mask = functools.reduce(operator.and_, masks) if masks else None
        valid = None
        if mask is not None:
            mask = keras.ops.convert_to_tensor(mask, dtype=loss.dtype)
            valid = keras.ops.sum(mask)
        if sample_weight is not None:
            sample_weight = keras.ops.convert_to_tensor(sample_weight, dtype=loss.dtype)
        weight = apply_mask(sample_weight, mask, values.dtype, loss.reduction)
        if weight is None:
            return values, None, valid
        weight = keras.ops.cast(weight, values.dtype)
        return *squeeze_or_expand_to_same_rank(values, weight), valid
