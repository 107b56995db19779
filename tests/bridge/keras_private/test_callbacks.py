"""What Keras's private names for callbacks mean (checked with Keras 3.15.1)."""

from bridge import keras_private  # isort: skip  # before keras: it chooses the backend

from unittest import mock

import keras
import pytest

from tests.bridge.keras_private.models import compiled


def test_batches_seen_since_last_saving_counts_to_save_freq(tmp_path):
    save = keras.callbacks.ModelCheckpoint(
        tmp_path / "x.weights.h5", save_weights_only=True, save_freq=3
    )
    save.set_model(compiled())
    save.on_epoch_begin(0)
    found = []
    for batch in range(4):
        found.append(keras_private.callbacks.batches_until_action(save))
        save.on_train_batch_end(batch, {})
    assert found == [3, 2, 1, 3]
    epochly = keras.callbacks.BackupAndRestore(tmp_path / "backup")
    assert keras_private.callbacks.batches_until_action(epochly) is None
    assert [keras_private.callbacks.ignores_batches(x) for x in (save, epochly)] == [False, True]


def test_tensorboard_counts_batches_and_knows_which_it_profiles(tmp_path):
    board = keras.callbacks.TensorBoard(tmp_path, update_freq=4, write_graph=False)
    board._summary_module = mock.MagicMock()
    board.set_model(compiled())
    board._start_batch, board._stop_batch, board._should_trace = 3, 6, True
    board._start_trace = board._stop_trace = lambda: None
    board.on_train_begin()
    found = []
    for batch in range(7):
        found.append(keras_private.callbacks.batches_until_action(board))
        board.on_train_batch_begin(batch)
        board.on_train_batch_end(batch, {})
    assert found == [2, 1, 2, 1, 2, 1, 2]
    epochly = keras.callbacks.TensorBoard(tmp_path)
    timing = keras.callbacks.TensorBoard(tmp_path, update_freq=4, write_steps_per_second=True)
    boards = board, epochly, timing
    until_action = [keras_private.callbacks.batches_until_action(x) for x in boards]
    assert until_action == [1, None, 1]
    assert [keras_private.callbacks.ignores_batches(x) for x in boards] == [False, True, False]


def test_what_keras_callbacks_remember_is_named_in_the_table(tmp_path):
    made = [
        keras.callbacks.EarlyStopping(),
        keras.callbacks.ReduceLROnPlateau(),
        keras.callbacks.ModelCheckpoint(tmp_path / "x.keras"),
        keras.callbacks.OrbaxCheckpoint(tmp_path / "orbax"),
        keras.callbacks.SwapEMAWeights(),
        keras.callbacks.History(),
    ]
    for callback in made:
        callback.set_model(compiled())
        if not isinstance(callback, keras.callbacks.OrbaxCheckpoint):
            callback.on_train_begin()
        found = keras_private.callbacks.state(callback)
        assert len(found) >= 1
        keras_private.callbacks.restore(callback, dict.fromkeys(found, 7))
        assert set(keras_private.callbacks.state(callback).values()) == {7}
        assert found.keys() == keras_private.callbacks.state(callback).keys()
    assert keras_private.callbacks.state(keras.callbacks.TerminateOnNaN()) == {}


def test_the_callback_that_asks_for_a_mode_is_that_of_the_error():
    stop = keras.callbacks.EarlyStopping("unknown")
    stop.set_model(compiled())
    with pytest.raises(ValueError, match="Pass `mode='max'`") as error:
        stop.on_epoch_end(0, {})
    assert keras_private.callbacks.callback_without_mode(error.value) is stop
    with pytest.raises(ValueError, match="mode") as error:
        raise ValueError("another mode")
    assert keras_private.callbacks.callback_without_mode(error.value) is None


def test_callbacks_of_a_class_are_told_apart_by_their_value_and_file(tmp_path):
    made = {
        "val_loss": keras.callbacks.EarlyStopping(),
        "loss": keras.callbacks.ReduceLROnPlateau("loss"),
        "val_loss, x.keras": keras.callbacks.ModelCheckpoint(tmp_path / "x.keras"),
        "val_loss, orbax": keras.callbacks.OrbaxCheckpoint(tmp_path / "orbax"),
        "log.csv": keras.callbacks.CSVLogger(tmp_path / "log.csv"),
        "board": keras.callbacks.TensorBoard(tmp_path / "board"),
        "": keras.callbacks.History(),
    }
    assert [keras_private.callbacks.default_key(callback) for callback in made.values()] == list(
        made
    )
    assert all(map(keras_private.callbacks.has_state, made.values()))
    assert not keras_private.callbacks.has_state(keras.callbacks.TerminateOnNaN())


def test_tensorboard_goes_on_counting(tmp_path):
    board = keras.callbacks.TensorBoard(tmp_path)
    board._global_train_batch = 5
    again = keras.callbacks.TensorBoard(tmp_path)
    keras_private.callbacks.restore(again, keras_private.callbacks.state(board))
    assert again._global_train_batch == 5
