"""Whether a model's steps are compiled."""

import keras

from functrain.internal import Mode


def runs_uncompiled(model: keras.Model, rewrites: Mode) -> bool:
    """Whether a step runs operation by operation, as in Keras."""
    if model.run_eagerly or model.jit_compile:
        return bool(model.run_eagerly)
    return True
