"""The models of keras.applications go to a state and back unchanged."""

import keras
import numpy as np
import optax
import pytest
from keras import applications

import bridge
from bridge.model import _variables

ALL = sorted(
    name for name, member in vars(applications).items() if callable(member) and name[0].isupper()
)
SIZES = {"InceptionResNetV2": 75, "InceptionV3": 75, "Xception": 71}


def make(name: str) -> keras.Model:
    size = SIZES.get(name, 32)
    build = getattr(applications, name)
    return build(weights=None, classes=10, input_shape=(size, size, 3))


@pytest.mark.long
@pytest.mark.parametrize("name", ALL)
def test_a_round_trip_of_every_application_is_the_identity(name: str) -> None:
    source, target = make(name), make(name)
    # Layers without a name have other numbers in the second instance.
    layout = _variables.layout(source)
    assert len(layout.params) + len(layout.model_state) == len(source.variables)
    bridge.to_keras(bridge.create_state(source, optax.sgd(0.1)), target)
    for x, y in zip(source.variables, target.variables, strict=True):
        np.testing.assert_array_equal(np.asarray(x), np.asarray(y), strict=True)
    keras.backend.clear_session()
