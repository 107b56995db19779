"""The same identity for whole architectures, with all rewrites on."""

import jax
import jax.numpy as jnp
import keras
import numpy as np
import optax
import pytest

import bridge
import functrain as ft

from ..conftest import digest


@pytest.mark.long
@pytest.mark.parametrize("name", ["MobileNetV2", "EfficientNetB0", "ResNet50", "ConvNeXtTiny"])
def test_fused_is_single(name) -> None:
    keras.utils.set_random_seed(0)
    model = getattr(keras.applications, name)(
        weights=None, input_shape=(32, 32, 3), classes=10, classifier_activation=None
    )
    tx = optax.adam(1e-3)
    state = bridge.create_state(model, tx)
    loss = optax.softmax_cross_entropy_with_integer_labels
    step = ft.train_step(ft.supervised(bridge.from_keras(model), loss), tx)
    rng = np.random.default_rng(0)
    chunk = (
        rng.normal(size=(3, 4, 32, 32, 3)).astype(np.float32),
        rng.integers(0, 10, (3, 4)).astype(np.int32),
    )
    together, _ = ft.fuse(step, 3)(jax.tree.map(jnp.copy, state), chunk)
    alone = jax.tree.map(jnp.copy, state)
    for i in range(3):
        alone, _ = ft.fuse(step, 1)(alone, jax.tree.map(lambda x, i=i: x[i : i + 1], chunk))
    assert digest(together) == digest(alone)
