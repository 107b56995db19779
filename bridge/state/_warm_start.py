"""`warm_start`: takes part of a state from a file that Keras wrote."""

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
from functrain.internal import PyTree, open_arrays, require_instance


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
    """Takes leaves of a state from a `.keras` or `.weights.h5` file; all others stay.

    Works as `functrain.warm_start` does, and translates Keras's names (``layers/dense_1/vars/0``)
    to paths in the state (``params/head/kernel``). Only the weights of a `.keras` file are read:
    no layer is built from it, and no Lambda runs.

    Args:
      state: From `create_state`; or any state with such paths.
      source: The file.
      model: A built model of the architecture in the file. It may differ in the leaves that are
        not taken, such as the width of the head. Its values are not used, and stay.
      take: As for `functrain.warm_start`.
      skip: As for `functrain.warm_start`.
      rename: Given a variable's path in `model`, such as ``params/body/kernel``, returns its path
        in the state. Needed if `model` is only a part of the model of the state.
      cast: As for `functrain.warm_start`.

    Returns:
      WarmStart(state, loaded, unused, missing, unchanged, source).

    Raises:
      TypeError: `model` is not a keras.Model.
      ValueError: `model` is not built, or any error of `functrain.warm_start`.

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
      >>> warm.loaded
      {'params/body/bias': 'layers/dense/vars/1', 'params/body/kernel': 'layers/dense/vars/0'}
    """
    require_instance("model", model, keras.Model, "a keras.Model")
    require_built(model)
    state_paths = _state_paths(model)

    def to_state_path(file_name: str) -> str:
        # Arrays that are no variables of the model are reported under their names in the file.
        if file_name not in state_paths:
            return file_name
        path = state_paths[file_name]
        return path if rename is None else rename(path)

    return functrain.warm_start(
        state, source, take=take, skip=skip, rename=to_state_path, cast=cast
    )


def _state_paths(model: keras.Model) -> dict[str, str]:
    """Returns the path of each variable in a state, by its name in `.weights.h5` and `.keras`.

    Keras names a variable by its layer's position in the model, ``layers/dense_1/vars/0``, with
    rules that each layer may override. So Keras itself writes a file here, in which the value of
    each variable is replaced by its number.

    Args:
      model: A built model; it has its values again afterwards.

    Raises:
      ValueError: Keras cannot save a layer with such values.
    """
    layout = _variables.layout(model)
    paths = [f"params/{'/'.join(path)}" for path in layout.params]
    paths += [f"model_state/{'/'.join(path)}" for path in layout.model_state]
    markers = [(v, _marker(i, v)) for i, v in enumerate(layout.variables().values())]
    try:
        with keras_private.variables.temporary_values(markers):
            saved_markers = _save_and_read_markers(model)
    # A layer may override how it is saved, and then fail with any error at other values or shapes.
    except Exception as error:
        raise ValueError(
            f"model: expected {model.name!r} to save its variables with other values, but Keras "
            f"could not write the file that shows their names: {error}. Load the file by "
            "model.load_weights, and make a state of the model: bridge.create_state(model, tx)."
        ) from error
    path_by_marker = {(i, ~i): path for i, path in enumerate(paths)}
    state_paths: dict[str, str] = {}
    for name, marker in saved_markers.items():
        path = path_by_marker.get(tuple(marker.tolist()))
        # Keras writes some variables twice, such as the kernel in a SpectralNormalization.
        if path is not None and path not in state_paths.values():
            state_paths[name] = path
    return state_paths


def _save_and_read_markers(model: keras.Model) -> dict[str, np.ndarray]:
    """Saves a model, and returns the arrays of the file that have the shape of a marker."""
    with tempfile.TemporaryDirectory() as folder:
        file = os.path.join(folder, "names.weights.h5")
        model.save_weights(file)
        with open_arrays(file) as arrays:
            # A variable with other values than a marker may have its shape, but not its content.
            names = [name for name, spec in arrays.specs.items() if spec.endswith("[2]")]
            return {name: arrays.read(name) for name in names}


def _marker(number: int, variable: Any) -> np.ndarray:
    """Returns an array that stands for a number; the second element confirms the first.

    Keras adds the LoRA update to a kernel when it saves it, so the markers of LoRA variables are
    zero: the sum still is the kernel's marker.
    """
    if variable.name.startswith("lora_"):
        return np.zeros(2, np.int32)
    return np.array([number, ~number], np.int32)
