"""What a model's variables are called in the files that Keras writes."""

import os
import tempfile
from typing import Any

import keras
import numpy as np

from bridge import keras_private
from bridge.model import _variables
from functrain.internal import arrays_in


def file_names(model: keras.Model) -> dict[str, str]:
    """Returns the path of each variable in a state, by its name in `.weights.h5` and `.keras`.

    Keras names variables by where a layer stands in its model, ``layers/dense_1/vars/0``, by rules
    of its own. So it is asked: it writes a file in which each variable's value is its number.

    Args:
      model: A built model; it has its values again afterwards.

    Raises:
      ValueError: A layer cannot be saved so.

    Examples:
      >>> model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(2)])
      >>> file_names(model)
      {'layers/dense/vars/0': 'params/dense/kernel', 'layers/dense/vars/1': 'params/dense/bias'}
    """
    where = _variables.layout(model)
    paths = [
        ("/".join((part, *path)), variable)
        for part, variables in (("params", where.params), ("model_state", where.model_state))
        for path, variable in variables.items()
    ]
    markers = [(variable, _marker(i, variable)) for i, (_, variable) in enumerate(paths)]
    try:
        with keras_private.variables.other_values(markers), tempfile.TemporaryDirectory() as folder:
            file = os.path.join(folder, "names.weights.h5")
            model.save_weights(file)
            with arrays_in(file) as arrays:
                small = [n for n, spec in arrays.specs.items() if spec.endswith("[2]")]
                found = dict(arrays.read(small))
    except Exception as error:
        raise ValueError(
            f"model: expected {model.name!r} to save its variables as they are, but Keras could "
            f"not say what they are called in a file: {error}. Load the file by "
            "model.load_weights, and make a state of the model: bridge.create_state(model, tx)."
        ) from error
    names: dict[str, str] = {}
    for name, x in found.items():
        i = int(x[0])
        # Keras writes some variables twice, such as the kernel in a SpectralNormalization.
        if 0 <= i < len(paths) and x[1] == ~i and paths[i][0] not in names.values():
            names[name] = paths[i][0]
    return names


def _marker(number: int, variable: Any) -> np.ndarray:
    """Returns a number as an array that no other value of a model is.

    What LoRA adds to a kernel is written as part of the kernel, and must not change its number.
    """
    added = variable.name.startswith("lora_")
    return np.zeros(2, np.int32) if added else np.array([number, ~number], np.int32)
