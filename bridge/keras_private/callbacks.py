"""When Keras's own callbacks act between two epochs."""

import os
from typing import Any

import keras
from keras.src.utils.python_utils import pythonify_logs

_OF_SAVING = ("best", "_batches_seen_since_last_saving", "_last_batch_seen")
_PATHS = ("filepath", "directory", "filename", "log_dir")
# What Keras's own callbacks remember from epoch to epoch, and from batch to batch.
_MEMORY = {
    keras.callbacks.EarlyStopping: ("wait", "stopped_epoch", "best", "best_weights", "best_epoch"),
    keras.callbacks.ReduceLROnPlateau: ("wait", "best", "cooldown_counter"),
    keras.callbacks.ModelCheckpoint: _OF_SAVING,
    keras.callbacks.OrbaxCheckpoint: (*_OF_SAVING, "_total_batches_seen"),
    keras.callbacks.TensorBoard: ("_global_train_batch", "_global_test_batch"),
    keras.callbacks.SwapEMAWeights: ("_ema_weights_in_model",),
    keras.callbacks.History: ("history", "epoch"),
    keras.callbacks.CSVLogger: ("keys",),  # from its first row on, whose logs alone they come from
}


def memory(callback: Any) -> dict[str, Any]:
    """Returns what a callback of one of Keras's classes, or derived from it, remembers.

    Reads the attributes of `_MEMORY`, of which those of ModelCheckpoint, OrbaxCheckpoint,
    TensorBoard and SwapEMAWeights are private, and `monitor_op`; checked with Keras 3.15.1. Without
    them a run that is resumed saves, records and stops at other steps than one that is not.
    """
    names = _names(callback)
    found = {name: getattr(callback, name) for name in names if hasattr(callback, name)}
    return {**found, "compares": True} if getattr(callback, "monitor_op", None) else found


def has_memory(callback: Any) -> bool:
    """Returns True if `memory` may return something for a callback. Public names only."""
    return bool(_names(callback))


def watched(callback: Any) -> str:
    """Returns what tells a callback from others of its class: its value, and its file's name.

    Reads `monitor`, `filepath`, `directory`, `filename` and `log_dir` of Keras's callbacks; checked
    with Keras 3.15.1. Without it two callbacks of a class cannot be told apart in a checkpoint.
    """
    values = {name: str(getattr(callback, name, "")) for name in ("monitor", *_PATHS)}
    files = [os.path.basename(os.path.normpath(values[name])) for name in _PATHS if values[name]]
    return ", ".join([*filter(None, [values["monitor"]]), *files])


def put_memory(callback: Any, found: dict[str, Any]) -> None:
    """Puts back what `memory` returned.

    Calls `MonitorCallback._set_monitor_op`, as Keras does at the first epoch's end; checked with
    Keras 3.15.1. Without it a ModelCheckpoint that saves the best of some batches has nothing to
    compare with in the epoch that goes on.
    """
    if "compares" in found and callback.monitor_op is None:
        callback._set_monitor_op()
    for name in _names(callback):
        if name in found:
            setattr(callback, name, found[name])


def as_floats(logs: Any) -> dict[str, Any]:
    """Returns logs as callbacks get them: flat, sorted by name, and single numbers as floats.

    Calls `pythonify_logs`; checked with Keras 3.15.1. Without it callbacks get arrays.
    """
    return dict(pythonify_logs(logs))


def _names(callback: Any) -> list[str]:
    return [n for cls, names in _MEMORY.items() if isinstance(callback, cls) for n in names]


def batches_between(callback: Any) -> int | None:
    """Returns how many batches lie between two at which a callback of Keras's does something.

    Reads `update_freq` and `write_steps_per_second` of TensorBoard, which are public, and
    `_batches_seen_since_last_saving` of ModelCheckpoint, BackupAndRestore and OrbaxCheckpoint,
    which alone have a `save_freq` in batches; checked with Keras 3.15.1. None where it does
    nothing with batches, or with each of them, from their logs alone.
    """
    if isinstance(callback, keras.callbacks.TensorBoard):
        # It takes the time of single batches where it writes their number per second.
        every: Any = 1 if callback.write_steps_per_second else callback.update_freq
        return None if callback.update_freq == "epoch" else int(every)
    every = getattr(callback, "save_freq", "epoch")
    saves = hasattr(callback, "_batches_seen_since_last_saving")
    return every if saves and isinstance(every, int) else None


def batches_until_due(callback: Any) -> int | None:
    """Returns how many batches from now a callback of Keras's does something; None if never.

    Reads `_batches_seen_since_last_saving` as `batches_between` does, and `_global_train_batch`,
    `_should_trace`, `_start_batch` and `_stop_batch` of TensorBoard; checked with Keras 3.15.1.
    Without it they save, record and profile what the model was at the end of a chunk.
    """
    every = batches_between(callback)
    if not isinstance(callback, keras.callbacks.TensorBoard):
        return every and max(1, every - callback._batches_seen_since_last_saving)
    begun = int(callback._global_train_batch)
    due = [every - begun % every] if every else []
    if callback._should_trace:  # the batch before the first one that is profiled, and the last
        due += [n - begun for n in (callback._start_batch - 1, callback._stop_batch) if n > begun]
    return min(due, default=None)


def only_epochs(callback: Any) -> bool:
    """Whether a callback of Keras's that overrides batch methods does nothing in them.

    Reads `TensorBoard._should_trace`; checked with Keras 3.15.1. Without it logs that no
    callback reads are fetched after each chunk.
    """
    if isinstance(callback, keras.callbacks.TensorBoard):
        return bool(callback.update_freq == "epoch" and not callback._should_trace)
    return getattr(callback, "save_freq", None) == "epoch"
