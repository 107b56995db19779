"""Several processes that fit one model: what each may do, and who writes."""

import contextlib
import os
import tempfile
from collections.abc import Iterator
from typing import Any

import jax
import keras


def require_together(model: keras.Model, callbacks: Any) -> None:
    """Refuses to fit in several processes what they would not fit together.

    Raises:
      ValueError: Variables lie on the devices of this process alone, or a callback of Keras's
        would do something else in each process.
    """
    if jax.process_count() == 1:
        return
    own = [v for v in model.variables if getattr(v.value, "is_fully_addressable", True)]
    if keras.distribution.distribution() is None or own:
        what = f"{own[0].path} on the devices of one" if own else "no distribution"
        raise ValueError(
            f"model: expected one that lies on the devices of all {jax.process_count()} processes, "
            f"got {what}: each would fit a model of its own. Before the model is made: "
            "keras.utils.set_random_seed(0), and "
            "keras.distribution.set_distribution(keras.distribution.DataParallel())."
        )
    parts = [v for v in model.variables if not v.value.is_fully_replicated]
    for callback in _flat(callbacks):
        saves = isinstance(callback, keras.callbacks.ModelCheckpoint) and parts
        if saves or isinstance(callback, keras.callbacks.BackupAndRestore):
            name = type(callback).__name__
            raise ValueError(
                f"callbacks: expected no {name} where several processes fit a model"
                f"{', of which each has but parts' * bool(saves)}, got one. Pass "
                "checkpointer=functrain.Checkpointer(directory), into which all of them write."
            )


@contextlib.contextmanager
def files_of_the_first(callbacks: Any) -> Iterator[None]:
    """Has Keras's own callbacks write in the first process; in others, where it is thrown away.

    Not left out: chunks end where callbacks want it, the same in all processes.
    """
    if jax.process_index() == 0:
        yield
        return
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as undo:
        for i, callback in enumerate(_flat(callbacks)):
            for kind, name in _FILES.items():
                if isinstance(callback, kind):
                    before = getattr(callback, name)
                    undo.callback(setattr, callback, name, before)
                    new = os.path.join(folder, str(i), os.path.basename(os.fspath(before)))
                    os.makedirs(os.path.dirname(new))
                    setattr(callback, name, new)
        yield


_FILES = {
    keras.callbacks.CSVLogger: "filename",
    keras.callbacks.ModelCheckpoint: "filepath",
    keras.callbacks.TensorBoard: "log_dir",
}


def _flat(callbacks: Any) -> list[Any]:
    found = keras.tree.flatten(getattr(callbacks, "callbacks", callbacks))
    return [callback for callback in found if callback is not None]
