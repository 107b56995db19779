"""The state of Keras's own callbacks, and the batches at which they act."""

import os
import traceback
from typing import Any

import keras

_SAVING_STATE = ("best", "_batches_seen_since_last_saving", "_last_batch_seen")
_PATHS = ("filepath", "directory", "filename", "log_dir")
# The attributes in which Keras's own callbacks keep state from epoch to epoch or batch to batch.
_STATE = {
    keras.callbacks.EarlyStopping: ("wait", "stopped_epoch", "best", "best_weights", "best_epoch"),
    keras.callbacks.ReduceLROnPlateau: ("wait", "best", "cooldown_counter"),
    keras.callbacks.ModelCheckpoint: _SAVING_STATE,
    keras.callbacks.OrbaxCheckpoint: (*_SAVING_STATE, "_total_batches_seen"),
    keras.callbacks.TensorBoard: ("_global_train_batch", "_global_test_batch"),
    keras.callbacks.SwapEMAWeights: ("_ema_weights_in_model",),
    keras.callbacks.History: ("history", "epoch"),
    # CSVLogger takes its columns from the logs of its first row, and only from these.
    keras.callbacks.CSVLogger: ("keys",),
}


def state(callback: Any) -> dict[str, Any]:
    """Returns the state of a callback of one of Keras's classes, or of a subclass.

    Reads `monitor_op` and the attributes in `_STATE`, which are private in ModelCheckpoint,
    OrbaxCheckpoint, TensorBoard and SwapEMAWeights; checked with Keras 3.15.1. Without them a
    resumed run saves, records and stops at other steps than an uninterrupted one.
    """
    names = [name for name in _state_names(callback) if hasattr(callback, name)]
    saved = {name: getattr(callback, name) for name in names}
    if getattr(callback, "monitor_op", None):
        # The function itself cannot be saved, and `restore` can make it again.
        saved["compares"] = True
    return saved


def callback_without_mode(error: ValueError) -> Any:
    """Returns the callback that asks for a mode in this error; None for any other error.

    Compares the function that raised the error with `MonitorCallback._set_monitor_op`; checked with
    Keras 3.15.1. Without it the advice about a misspelled metric would be added to errors of users'
    own callbacks, too.
    """
    *_, (frame, _) = traceback.walk_tb(error.__traceback__)
    asks_for_mode = frame.f_code is keras.callbacks.EarlyStopping._set_monitor_op.__code__
    return frame.f_locals["self"] if asks_for_mode else None


def has_state(callback: Any) -> bool:
    """Returns True if `state` may return something for a callback. Public names only."""
    return bool(_state_names(callback))


def default_key(callback: Any) -> str:
    """Returns what distinguishes a callback from others of its class: its metric and file name.

    Reads `monitor`, `filepath`, `directory`, `filename` and `log_dir` of Keras's callbacks; checked
    with Keras 3.15.1. Without it two callbacks of a class cannot be told apart in a checkpoint.
    """
    parts = [str(getattr(callback, "monitor", ""))]
    for name in _PATHS:
        path = str(getattr(callback, name, ""))
        parts.append(os.path.basename(os.path.normpath(path)) if path else "")
    return ", ".join(filter(None, parts))


def restore(callback: Any, saved: dict[str, Any]) -> None:
    """Restores what `state` returned.

    Calls `MonitorCallback._set_monitor_op`, as Keras does at the end of the first epoch; checked
    with Keras 3.15.1. Without it a ModelCheckpoint that saves the best batches has nothing to
    compare with in the epoch that is resumed.
    """
    # A callback that has begun already may have its function.
    if "compares" in saved and callback.monitor_op is None:
        callback._set_monitor_op()
    for name in _state_names(callback):
        if name in saved:
            setattr(callback, name, saved[name])


def _state_names(callback: Any) -> list[str]:
    """Returns the attributes of a callback that are its state."""
    return [name for cls, names in _STATE.items() if isinstance(callback, cls) for name in names]


def batches_until_action(callback: Any) -> int | None:
    """Returns in how many batches a callback of Keras's next acts on the model; None if never.

    Reads `_batches_seen_since_last_saving` of ModelCheckpoint, BackupAndRestore and
    OrbaxCheckpoint, the only callbacks with a `save_freq` in batches, and `_global_train_batch`,
    `_should_trace`, `_start_batch` and `_stop_batch` of TensorBoard; checked with Keras 3.15.1.
    Without it they save, record and profile the model as it is at the end of a chunk.
    """
    if isinstance(callback, keras.callbacks.TensorBoard):
        return _batches_until_record(callback)
    interval = getattr(callback, "save_freq", "epoch")
    # A callback of the user's may have a `save_freq` that means something else.
    if not hasattr(callback, "_batches_seen_since_last_saving") or not isinstance(interval, int):
        return None
    # Keras saves at every batch if `save_freq` is 0 or False.
    remaining: int = interval - callback._batches_seen_since_last_saving
    return max(1, remaining)


def _batches_until_record(board: Any) -> int | None:
    """Returns in how many batches TensorBoard writes next, or begins or ends a profile."""
    due: list[int] = []
    batches_seen = int(board._global_train_batch)
    if board.update_freq != "epoch":
        # To write steps per second, TensorBoard measures the time of every single batch.
        interval = 1 if board.write_steps_per_second else int(board.update_freq)
        due.append(interval - batches_seen % interval)
    if board._should_trace:
        # A chunk has to end before the first profiled batch, and after the last one.
        for batch in (board._start_batch - 1, board._stop_batch):
            if batch > batches_seen:
                due.append(batch - batches_seen)
    return min(due, default=None)


def ignores_batches(callback: Any) -> bool:
    """Returns True if a callback of Keras's that overrides batch methods does nothing in them.

    Reads `TensorBoard._should_trace`; checked with Keras 3.15.1. Without it logs that no
    callback reads are fetched after each chunk.
    """
    if isinstance(callback, keras.callbacks.TensorBoard):
        return bool(callback.update_freq == "epoch" and not callback._should_trace)
    return getattr(callback, "save_freq", None) == "epoch"
