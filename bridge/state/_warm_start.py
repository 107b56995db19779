"""`warm_start`: takes part of a state from a file that Keras wrote."""

import os
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import keras
import numpy as np

import functrain
from bridge import keras_private
from bridge.model import _variables
from bridge.model._from_keras import require_built
from functrain import WarmStart
from functrain.internal import PyTree, open_arrays, require_instance
from functrain.internal import tree as _tree


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
    to paths in the state (``params/head/kernel``). Layers are matched by their names, which Keras
    notes in the file, and layers in attributes by the attribute. Layers that Keras named itself
    (`dense_1`) are matched in their order if the file has as many of their class. Only the weights
    of a `.keras` file are read: no layer is built from it, and no Lambda runs.

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
      ValueError: `model` is not built; the names do not say which of several unnamed layers is
        which, and they are to be taken; or any error of `functrain.warm_start`.

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
    path = os.path.expanduser(os.fspath(source))
    state_paths, model_layers = _saved_variables(model)
    with open_arrays(path) as arrays:
        file_layers = dict(arrays.layer_names)
    groups = _Groups(file_layers, model_layers)

    def to_state_path(file_name: str) -> str:
        state_path = state_paths.get(groups.to_model(file_name))
        # Arrays that are no variables of the model are reported under their names in the file.
        if state_path is None:
            return file_name
        return state_path if rename is None else rename(state_path)

    unclear = {
        path: f"{path}: layer {groups.layer_of(name)!r}"
        for name, path in state_paths.items()
        if groups.is_unclear(name)
    }
    message = (
        f"{path}: expected layers whose names tell which is which, got other numbers of layers "
        "that Keras named itself than the model has, for\n{}\nName the layers in both, or leave "
        "these out with take= or skip=. model.load_weights(file) matches layers by position."
    )
    try:
        warm = functrain.warm_start(
            state, path, take=take, skip=skip, rename=to_state_path, cast=cast
        )
    except ValueError as error:
        if unclear:
            error.add_note(message.format(_tree.bullets(list(unclear.values()))))
        raise
    if lines := [unclear[name] for name in warm.missing if name in unclear]:
        raise ValueError(message.format(_tree.bullets(lines)))
    return warm


class _Groups:
    """The groups of layers in a file, and those of the same layers in a file of the model.

    Keras names the group of a layer after its class and its position, ``layers/dense_1``, and notes
    the layer's own name there. Layers are matched by these names. Names that Keras made of the
    class, such as `dense_4`, count the layers of a process: they are matched in their order, if
    both sides have equally many.

    Args:
      file_layers: The names of the layers in the file, by group.
      model_layers: Those of the model.
    """

    def __init__(self, file_layers: Mapping[str, str], model_layers: Mapping[str, str]) -> None:
        self._model_layers = model_layers
        self._file_members = _members(file_layers)
        self._model_members = _members(model_layers)
        self._unclear: set[str] = set()
        # The group in the model by the group in the file; `to_model` relies on parents before
        # children.
        self._matches: dict[str, str | None] = {"": ""}
        for container in sorted(self._file_members, key=lambda path: path.count("/")):
            in_model = self.to_model(container)
            self._match(self._file_members[container], self._model_members.get(in_model, {}))

    def to_model(self, path: str) -> str:
        """Returns the path in a file of the model of a path in the file; "" without a match."""
        done, translated = "", ""
        for part in path.split("/"):
            done = f"{done}/{part}".lstrip("/")
            if done not in self._matches:
                translated = f"{translated}/{part}".lstrip("/")
            elif (match := self._matches[done]) is not None:
                translated = match
            else:
                return ""
        return translated

    def is_unclear(self, path: str) -> bool:
        """Returns True for a path in a file of the model if its layer could be several ones."""
        return any(path.startswith(f"{group}/") for group in self._unclear)

    def layer_of(self, path: str) -> str:
        """Returns the name of the layer that holds a variable, of a path in a file of the model."""
        return self._model_layers[path.rpartition("/vars/")[0]]

    def _match(self, in_file: Mapping[str, str], in_model: Mapping[str, str]) -> None:
        """Matches the layers of one container; both arguments have names by group."""
        groups = {name: group for group, name in in_model.items()}
        for group, name in in_file.items():
            self._matches[group] = groups.get(name)
        numbered_file, numbered_model = _numbered_by_class(in_file), _numbered_by_class(in_model)
        for cls in numbered_file.keys() & numbered_model.keys():
            ours, theirs = numbered_model[cls], numbered_file[cls]
            names = {in_model[group] for group in ours}, {in_file[group] for group in theirs}
            if names[0] == names[1]:
                continue
            # Names of which some are equal were not counted in one process.
            if len(ours) != len(theirs) or names[0] & names[1]:
                self._unclear.update(ours)
                self._matches.update(dict.fromkeys(theirs))
            else:
                self._matches.update(zip(theirs, ours, strict=True))


def _members(layers: Mapping[str, str]) -> dict[str, dict[str, str]]:
    """Returns the names of the layers in each list or dict of layers, by group.

    The group of a layer that an attribute holds ends with the name of the attribute, which needs no
    match. A list or dict is no layer, so that it has no name.
    """
    members: dict[str, dict[str, str]] = {}
    for group, name in layers.items():
        container = group.rpartition("/")[0]
        if container and container not in layers:
            members.setdefault(container, {})[group] = name
    return members


def _numbered_by_class(members: Mapping[str, str]) -> dict[str, list[str]]:
    """Returns the groups of the layers that Keras may have named, in their order, by class."""
    numbered: dict[str, list[tuple[int, str]]] = {}
    for group, name in members.items():
        cls = re.sub(r"_\d+$", "", group.rpartition("/")[2])
        if match := re.fullmatch(rf"{re.escape(cls)}(?:_(\d+))?", name):
            numbered.setdefault(cls, []).append((int(match[1] or 0), group))
    return {cls: [group for _, group in sorted(pairs)] for cls, pairs in numbered.items()}


def _saved_variables(model: keras.Model) -> tuple[dict[str, str], dict[str, str]]:
    """Returns the path of each variable in a state, by its name in a file of the model.

    Also returns the names of the layers by their groups in the file. Each layer may override how it
    is saved. So Keras's own code saves the model here, with a number in place of each variable.

    Raises:
      ValueError: Keras cannot save a layer with such values.
    """
    layout = _variables.layout(model)
    paths = [f"params/{'/'.join(path)}" for path in layout.params]
    paths += [f"model_state/{'/'.join(path)}" for path in layout.model_state]
    markers = [(v, _marker(i, v)) for i, v in enumerate(layout.variables().values())]
    try:
        with keras_private.variables.temporary_values(markers):
            saved_markers, layer_names = keras_private.saving.saved_arrays(model)
    # A layer may override how it is saved, and then fail with any error at other values or shapes.
    except Exception as error:
        raise ValueError(
            f"model: expected {model.name!r} to save its variables with other values, but Keras "
            f"could not: {error}. Load the file by model.load_weights, and make a state of the "
            "model: bridge.create_state(model, tx)."
        ) from error
    path_by_marker = {(i, ~i): path for i, path in enumerate(paths)}
    state_paths: dict[str, str] = {}
    for name, marker in saved_markers.items():
        # A variable with other values than a marker may have its shape, but not its content.
        path = path_by_marker.get(tuple(marker.ravel().tolist())) if marker.size == 2 else None
        # Keras writes some variables twice, such as the kernel in a SpectralNormalization.
        if path is not None and path not in state_paths.values():
            state_paths[name] = path
    return state_paths, layer_names


def _marker(number: int, variable: Any) -> np.ndarray:
    """Returns an array that stands for a number; the second element confirms the first.

    Keras adds the LoRA update to a kernel when it saves it, so the markers of LoRA variables are
    zero: the sum still is the kernel's marker.
    """
    if variable.name.startswith("lora_"):
        return np.zeros(2, np.int32)
    return np.array([number, ~number], np.int32)
