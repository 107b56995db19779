"""The private names of keras_private/saving.py."""

import bridge  # isort: skip  # before keras: it chooses the backend

import h5py
import keras
import numpy as np
from keras import layers

from bridge import keras_private

del bridge


def test_the_arrays_and_names_are_those_of_a_file_that_keras_writes(tmp_path) -> None:
    inner = keras.Sequential([keras.Input((4,)), layers.Dense(3, name="a"), layers.Dense(3)])
    model = keras.Sequential([keras.Input((4,)), inner, layers.BatchNormalization(name="norm")])
    model.save_weights(tmp_path / "model.weights.h5")
    arrays, names = keras_private.saving.saved_arrays(model)
    in_file = {}
    with h5py.File(tmp_path / "model.weights.h5") as file:
        file.visititems(
            lambda name, node: (
                in_file.update({name: node[()]}) if isinstance(node, h5py.Dataset) else None
            )
        )
        for group, name in names.items():
            assert file[f"{group}/vars".lstrip("/")].attrs["name"] == name
    assert arrays.keys() == in_file.keys()
    for name, array in arrays.items():
        np.testing.assert_array_equal(array, in_file[name])
