"""A part of a state out of a file that Keras wrote."""

import os
import tempfile
from collections.abc import Callable, Sequence
from typing import Any

import keras
import numpy as np

import functrain
from bridge import keras_private
from bridge.model import _variables
from bridge.model._from_keras import require_built
from functrain import WarmStart
from functrain.internal import PyTree, arrays_in


def warm_start(
    state: PyTree,
    source: str | os.PathLike[str],
    model: keras.Model,
    *,
    take: str | Sequence[str] | None = None,
    skip: str | Sequence[str] = (),
    rename: Callable[[str], str] | None = None,
    cast: bool = False,
) -> WarmStart:
    """Takes leaves of a state out of a `.keras` or `.weights.h5` file; all others stay.

    As `functrain.warm_start`, with the names of Keras (``layers/dense_1/vars/0``) as those that
    states have (``params/head/kernel``). Of a `.keras` file the weights alone are read: no layer is
    built of what it says, and no Lambda runs.

    Args:
      state: From `create_state`; or anything with such paths.
      source: The file.
      model: A built model of the architecture in the file, or of one that differs in what is not
        taken, such as the width of the head. Its values play no part, and stay.
      take: As for `functrain.warm_start`.
      skip: As there.
      rename: Given a variable's path in `model`, such as ``params/body/kernel``, returns that in
        the state, where `model` is only a part of the one the state is of.
      cast: As there.

    Returns:
      WarmStart(state, taken, left, missing, kept, source).

    Raises:
      TypeError: `model` is no keras.Model.
      ValueError: `model` is not built; and what `functrain.warm_start` raises.

    Examples:
      >>> import bridge, keras, optax, tempfile
      >>> def build(classes):
      ...     body, head = keras.layers.Dense(8, name="body"), keras.layers.Dense(classes)
      ...     return keras.Sequential([keras.Input((3,)), body, head])
      >>> model = build(2)
      >>> state = bridge.create_state(model, optax.adam(1e-3))
      >>> with tempfile.TemporaryDirectory() as folder:
      ...     build(10).save(f"{folder}/old.keras")
      ...     warm = warm_start(state, f"{folder}/old.keras", model, skip="params/dense/**")
      >>> warm.taken
      {'params/body/bias': 'layers/dense/vars/1', 'params/body/kernel': 'layers/dense/vars/0'}
    """
    if not isinstance(model, keras.Model):
        raise TypeError(f"model: expected a keras.Model, got {type(model).__name__}")
    require_built(model)
    names = _file_names(model)

    def renamed(name: str) -> str:
        path = names.get(name, name)
        return path if rename is None or name not in names else rename(path)

    return functrain.warm_start(state, source, take=take, skip=skip, rename=renamed, cast=cast)


def _file_names(model: keras.Model) -> dict[str, str]:
    """Returns the path of each variable in a state, by its name in `.weights.h5` and `.keras`.

    Keras names variables by where a layer stands in its model, ``layers/dense_1/vars/0``, by rules
    of its own. So it is asked: it writes a file in which each variable's value is its number.

    Args:
      model: A built model; it has its values again afterwards.

    Raises:
      ValueError: A layer cannot be saved so.
    """
    layout = _variables.layout(model)
    paths = [f"params/{'/'.join(path)}" for path in layout.params]
    paths += [f"model_state/{'/'.join(path)}" for path in layout.model_state]
    markers = [(v, _marker(i, v)) for i, v in enumerate(layout.variables().values())]
    try:
        with (
            keras_private.variables.temporary_values(markers),
            tempfile.TemporaryDirectory() as folder,
        ):
            file = os.path.join(folder, "names.weights.h5")
            model.save_weights(file)
            with arrays_in(file) as arrays:
                small = [n for n, spec in arrays.specs.items() if spec.endswith("[2]")]
                markers_in_file = {name: arrays.read(name) for name in small}
    except Exception as error:
        raise ValueError(
            f"model: expected {model.name!r} to save its variables as they are, but Keras could "
            f"not say what they are called in a file: {error}. Load the file by "
            "model.load_weights, and make a state of the model: bridge.create_state(model, tx)."
        ) from error
    names: dict[str, str] = {}
    for name, marker in markers_in_file.items():
        number = int(marker[0])
        # Keras writes some variables twice, such as the kernel in a SpectralNormalization.
        if (
            marker[1] == ~number
            and 0 <= number < len(paths)
            and paths[number] not in names.values()
        ):
            names[name] = paths[number]
    return names


def _marker(number: int, variable: Any) -> np.ndarray:
    """Returns a number as an array that no other value of a model is.

    What LoRA adds to a kernel is written as part of the kernel, and must not change its number.
    """
    added = variable.name.startswith("lora_")
    return np.zeros(2, np.int32) if added else np.array([number, ~number], np.int32)
