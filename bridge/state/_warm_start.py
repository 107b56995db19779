"""`warm_start`: takes part of a state from a file that Keras wrote."""

import collections
import os
import re
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import keras
import numpy as np

import functrain
from bridge import keras_private
from bridge.model import _names, _variables
from bridge.model._from_keras import require_built
from functrain import Rename, WarmStart
from functrain.internal import (
    PyTree,
    find_items,
    open_arrays,
    require,
    require_instance,
    resolve_path,
)

# The trees of variables that Keras's OrbaxCheckpoint saves.
_TREES = ("trainable_variables/", "non_trainable_variables/")


def warm_start(
    state: PyTree,
    source: str | os.PathLike[str],
    model: keras.Model,
    *,
    take: str | Sequence[str] | None = None,
    skip: str | Sequence[str] = (),
    rename: Callable[[str], str] | Sequence[Rename] | None = None,
    cast: bool = False,
) -> WarmStart:
    """Takes leaves of a state from a file or a checkpoint of Keras; all others stay.

    Works as `functrain.warm_start` does, and translates Keras's names (``layers/dense_1/vars/0``)
    to paths in the state (``params/head/kernel``). Layers are matched by their names, which Keras
    notes in the file, and layers in attributes by the attribute. Layers that Keras named itself
    (`dense_1`) are matched in their order if those of a class in the file have the same numbers, or
    numbers that differ by a constant, and are missing otherwise. Only the weights of a `.keras`
    file are read: no layer is built from it, and no Lambda runs. Variables in a checkpoint of
    `keras.callbacks.OrbaxCheckpoint` are matched in the same way by their paths; of a model with
    the same paths but for the numbers that Keras gives, in their order.

    Args:
      state: From `create_state`; or any state with such paths.
      source: A `.keras` or `.weights.h5` file, or the directory of an OrbaxCheckpoint. Any other
        source of `functrain.warm_start` is read as there.
      model: A built model of the architecture in the file. It may differ in the leaves that are
        not taken, such as the width of the head. Its values are not used, and stay.
      take: As for `functrain.warm_start`.
      skip: As for `functrain.warm_start`.
      rename: Given a variable's path in `model`, such as ``params/body/kernel``, returns its path
        in the state. Needed if `model` is only a part of the model of the state. Of sources that
        are not Keras's: as for `functrain.warm_start`.
      cast: As for `functrain.warm_start`.

    Returns:
      WarmStart(state, loaded, transformed, unused, missing, unchanged, source).

    Raises:
      TypeError: `model` is not a keras.Model, or `rename` not a function for a file of Keras.
      ValueError: `model` is not built; or any error of `functrain.warm_start`.

    Examples:
      >>> import bridge, keras, optax, tempfile
      >>> def build(classes):
      ...     body = keras.layers.Dense(8, name="body")
      ...     head = keras.layers.Dense(classes, name="head")
      ...     return keras.Sequential([keras.Input((3,)), body, head])
      >>> model = build(2)
      >>> state = bridge.create_state(model, optax.adam(1e-3))
      >>> with tempfile.TemporaryDirectory() as folder:
      ...     build(10).save(f"{folder}/old.keras")
      ...     warm = warm_start(state, f"{folder}/old.keras", model, skip="params/head/**")
      >>> warm.loaded
      {'params/body/bias': 'layers/dense/vars/1', 'params/body/kernel': 'layers/dense/vars/0'}
    """
    require_instance("model", model, keras.Model, "a keras.Model")
    require_built(model)
    path = resolve_path(source, "source", is_written=False)
    options: Any = {"take": take, "skip": skip, "cast": cast}
    state_paths = _state_paths(path, model)
    if state_paths is None:
        return functrain.warm_start(state, path, rename=rename, **options)
    is_function = rename is None or callable(rename)
    expected, advice = "a function for a file of Keras", "Its layouts are those of the model."
    require(is_function, "rename", expected, rename, advice, error=TypeError)

    def to_state_path(file_name: str) -> str:
        state_path = state_paths.get(file_name)
        # Arrays that are no variables of the model are reported under their names in the file.
        if state_path is None:
            return file_name
        return rename(state_path) if callable(rename) else state_path

    return functrain.warm_start(state, path, rename=to_state_path, **options)


def _state_paths(path: str, model: keras.Model) -> dict[str, str] | None:
    """Returns the paths in a state of the arrays that Keras wrote; None if another program did."""
    if path.lower().endswith((".keras", ".h5", ".hdf5")):
        with open_arrays(path) as arrays:
            stable_names = _stable_names(arrays.specs, arrays.layer_names)
        saved = _saved_variables(model)
        pairs = ((name, saved.get(stable)) for name, stable in stable_names.items())
        return {name: state_path for name, state_path in pairs if state_path is not None}
    if not find_items(path):
        return None
    with open_arrays(path) as arrays:
        is_of_keras = any(name.startswith(_TREES) for name in arrays.specs)
        return _paths_in_tree(arrays.specs, model) if is_of_keras else None


def _paths_in_tree(names: Iterable[str], model: keras.Model) -> dict[str, str]:
    """Returns the path in a state of each variable in a checkpoint of Keras's OrbaxCheckpoint.

    It has variables by their paths, in which Keras numbers unnamed layers over the whole process.
    If all paths differ only in these numbers, variables are matched in the order of the numbers.
    """
    in_file = {tuple(x.partition("/")[2].split("/")): x for x in names if x.startswith(_TREES)}
    layout = _variables.layout(model)
    parts = {"params": layout.params, "model_state": layout.model_state}
    in_state = {
        tuple(variable.path.split("/")): f"{part}/{'/'.join(path)}"
        for part, variables in parts.items()
        for path, variable in variables.items()
    }
    ours, theirs = _names.numbered_alike(in_state), _names.numbered_alike(in_file)
    if ours.keys() != theirs.keys():
        classes = {_names.snake(type(x)) for x in keras_private.layers.all_layers(model)}
        ours, theirs = (_names.stable_paths(x, classes) for x in (in_state, in_file))
    common = [path for path in ours if path in theirs]
    return {in_file[theirs[path]]: in_state[ours[path]] for path in common}


def _stable_names(names: Iterable[str], layers: Mapping[str, str]) -> dict[str, str]:
    """Returns, for the names of arrays in a Keras file, names that do not depend on the process.

    Keras names the group of a layer in a list after its class and its position, ``layers/dense_1``,
    and notes the layer's own name there, which replaces it here. A name that Keras made of the
    class, such as `dense_4`, counts the layers of a process: here it is counted from the first of
    its class and list, beside the numbers of all of these, ``dense 0 of 0, 1``.

    Args:
      names: The names of the arrays.
      layers: The names of the layers, by group.
    """
    own_names: dict[str, str] = {}
    unnamed: dict[tuple[str, str], list[tuple[int, str]]] = collections.defaultdict(list)
    for group, name in layers.items():
        container, _, last = group.rpartition("/")
        # The group of a layer in an attribute has the name of the attribute, which is stable. A
        # list or dict is no layer, so that it has no name.
        if not container or container in layers:
            continue
        cls = re.sub(r"_\d+$", "", last)
        if match := re.fullmatch(rf"{re.escape(cls)}(?:_(\d+))?", name):
            unnamed[container, cls].append((int(match[1] or 0), group))
        else:
            own_names[group] = name
    for (_, cls), members in unnamed.items():
        numbers = sorted(number for number, _ in members)
        # Names with other gaps, such as a user's own `dense_2`, do not tell which layer is which.
        places = ", ".join(str(number - numbers[0]) for number in numbers)
        for number, group in members:
            own_names[group] = f"{cls} {number - numbers[0]} of {places}"

    def stable_name(name: str) -> str:
        parts = name.split("/")
        groups = ["/".join(parts[: depth + 1]) for depth in range(len(parts))]
        return "/".join(map(own_names.get, groups, parts))

    return {name: stable_name(name) for name in names}


def _saved_variables(model: keras.Model) -> dict[str, str]:
    """Returns the path of each variable in a state, by its stable name in a file of the model.

    Each layer may override how it is saved. So Keras itself writes a file here, with a number in
    place of each variable.
    """
    layout = _variables.layout(model)
    paths = [f"params/{'/'.join(path)}" for path in layout.params]
    paths += [f"model_state/{'/'.join(path)}" for path in layout.model_state]
    markers = [(v, _marker(i, v)) for i, v in enumerate(layout.variables().values())]
    with tempfile.TemporaryDirectory() as folder:
        file = f"{folder}/markers.weights.h5"
        with keras_private.variables.temporary_values(markers):
            model.save_weights(file)
        with open_arrays(file) as arrays:
            saved_markers = {name: arrays.read(name) for name in arrays.specs}
            stable_names = _stable_names(arrays.specs, arrays.layer_names)
    path_by_marker = {(i, ~i): path for i, path in enumerate(paths)}
    state_paths: dict[str, str] = {}
    for name, marker in saved_markers.items():
        # A variable with other values than a marker may have its shape, but not its content.
        path = path_by_marker.get(tuple(marker.ravel().tolist())) if marker.size == 2 else None
        # Keras writes some variables twice, such as the kernel in a SpectralNormalization.
        if path is not None and path not in state_paths.values():
            state_paths[stable_names[name]] = path
    return state_paths


def _marker(number: int, variable: keras.Variable) -> np.ndarray:
    """Returns an array that stands for a number; the second element confirms the first.

    Keras adds the LoRA update to a kernel when it saves it, so the markers of LoRA variables are
    zero: the sum still is the kernel's marker.
    """
    if variable.name.startswith("lora_"):
        return np.zeros(2, np.int32)
    return np.array([number, ~number], np.int32)
