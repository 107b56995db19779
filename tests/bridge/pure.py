"""What the tests of from_keras and create_state share."""

import jax
import numpy as np
import optax

import bridge

SGD = optax.sgd(0.1)


def start(model):
    """Returns (apply, params, model_state)."""
    pure = bridge.from_keras(model)
    return pure.apply, *pure.init(jax.random.key(0), None)


def call(model, x, training):
    """Calls a model as Keras's own trainer does."""
    if "training" in model.call_signature_parameters:
        return model(x, training=training)
    return model(x)


def specs(tree):
    return jax.tree.map(lambda x: (x.shape, x.dtype, x.weak_type), jax.eval_shape(lambda: tree))


def assert_equal(a, b):
    assert jax.tree.structure(a) == jax.tree.structure(b)
    jax.tree.map(lambda x, y: np.testing.assert_array_equal(x, y, strict=True), a, b)


def assert_close(a, b, model=None):
    # What was computed in bfloat16 has its precision, even where it ends in float32, as losses do.
    layers = [model, *getattr(model, "layers", ())] if model is not None else ()
    low = any(layer.compute_dtype == "bfloat16" for layer in layers)
    tolerance = 2e-2 if low else 1e-5

    def close(x, y):
        assert x.dtype == y.dtype
        np.testing.assert_allclose(
            np.asarray(x, np.float32), np.asarray(y, np.float32), tolerance, tolerance
        )

    jax.tree.map(close, a, b)


def snapshot(model):
    return [np.asarray(v) for v in model.variables]
