"""Where Keras's files keep a model's variables."""

from typing import Any

import keras
import numpy as np
from keras.src.saving import saving_lib


class _Recorder(saving_lib.H5IOStore):  # type: ignore[misc]  # keras has no types
    """A store that keeps what Keras would write into a file, without the file."""

    def __init__(self) -> None:
        self.arrays: dict[str, np.ndarray] = {}
        self.names: dict[str, str] = {}
        self._path = ""

    def __bool__(self) -> bool:
        return True

    def make(self, path: str, metadata: Any = None) -> "_Recorder":
        self._path = path
        if metadata:
            self.names[path] = metadata["name"]
        return self

    def __setitem__(self, key: str, value: Any) -> None:
        self.arrays["/".join(filter(None, [self._path, "vars", key]))] = np.asarray(value)


def saved_arrays(model: keras.Model) -> tuple[dict[str, np.ndarray], dict[str, str]]:
    """Returns the arrays that `save_weights` would write by their names in the file.

    Also returns the names of the layers by their groups in the file.

    Calls `saving_lib._save_state` with a subclass of `saving_lib.H5IOStore`; checked with Keras
    3.15.1. Each layer may override how it is saved, so without it the name of a variable in a file
    is unknown unless a file is written.
    """
    recorder = _Recorder()
    saving_lib._save_state(
        model,
        weights_store=recorder,
        assets_store=None,
        inner_path="",
        visited_saveables=set(),
    )
    return recorder.arrays, recorder.names
