"""Files, requests and lines that callbacks write are those of Keras."""

import bridge  # isort: skip  # before keras: it chooses the backend

import pathlib
import re
from typing import Any
from unittest import mock

import jax
import keras
import numpy as np
import orbax.checkpoint
import pytest

import functrain as ft
from bridge.train import _checks
from tests.bridge.fitting import Sizes, X, Y, assert_same, fit, fresh


@pytest.mark.parametrize(
    ("every", "execution", "fuse"),
    [("epoch", 1, "auto"), (4, 1, "auto"), (7, 1, "auto"), (5, 3, "auto"), (5, 3, 7)],
)
def test_model_checkpoint_writes_what_keras_writes(
    every: Any, execution: int, fuse: Any, tmp_path: pathlib.Path
) -> None:
    for name, way in (("theirs", keras.Model.fit), ("ours", bridge.fit)):
        path = tmp_path / name / "{epoch}-{batch}.weights.h5"
        if every == "epoch":
            path = tmp_path / name / "{epoch}.weights.h5"
        save = keras.callbacks.ModelCheckpoint(path, save_weights_only=True, save_freq=every)
        fused = {"fuse": fuse} if way is bridge.fit else {}
        fit(fresh(steps_per_execution=execution), way, callbacks=[save], **fused)
    files = sorted(file.name for file in (tmp_path / "theirs").iterdir())
    assert files == sorted(file.name for file in (tmp_path / "ours").iterdir())
    for file in files:
        a, b = fresh(), fresh()
        for model in (a, b):
            model.optimizer.build(model.trainable_variables)
        a.load_weights(tmp_path / "theirs" / file)
        b.load_weights(tmp_path / "ours" / file)
        assert_same(a, b)


def test_chunks_end_where_a_checkpoint_is_due(tmp_path: pathlib.Path) -> None:
    sizes = Sizes()
    path = tmp_path / "{batch}.weights.h5"
    save = keras.callbacks.ModelCheckpoint(path, save_weights_only=True, save_freq=4)
    fit(fresh(), callbacks=[save, sizes], epochs=1, fuse=8)
    assert sizes.seen == [4] * 4 + [8] * 4 + [12] * 4 + [13]


def test_a_save_within_an_execution_leaves_callbacks_with_the_model_at_its_end(
    tmp_path: pathlib.Path,
) -> None:
    theirs, ours = Sizes(), Sizes()
    fit(fresh(steps_per_execution=3), keras.Model.fit, callbacks=[theirs])
    checkpoints = ft.Checkpointer(tmp_path, every=ft.every(steps=4))
    fit(fresh(steps_per_execution=3), callbacks=[ours], checkpointer=checkpoints)
    assert ours.seen == theirs.seen


@pytest.mark.parametrize("every", ["epoch", 5, False])
def test_backup_and_restore_goes_on_as_keras_does(every: Any, tmp_path: pathlib.Path) -> None:
    results = []
    for name, way in (("theirs", keras.Model.fit), ("ours", bridge.fit)):

        def backup(name: str = name) -> Any:
            return keras.callbacks.BackupAndRestore(tmp_path / name, save_freq=every)

        def fail(epoch: int, logs: Any) -> None:
            if epoch == 2:
                raise RuntimeError("stop")

        model = fresh()
        failing = keras.callbacks.LambdaCallback(on_epoch_begin=fail)
        with pytest.raises(RuntimeError, match="stop"):
            fit(model, way, callbacks=[backup(), failing], epochs=4)
        model = fresh()
        history = fit(model, way, callbacks=[backup()], epochs=4)
        results.append((model, history.history))
    assert results[0][1] == results[1][1]
    assert_same(results[0][0], results[1][0])


def test_csv_logger_writes_what_keras_writes(tmp_path: pathlib.Path) -> None:
    for name, way in (("theirs", keras.Model.fit), ("ours", bridge.fit)):
        fit(fresh(), way, callbacks=[keras.callbacks.CSVLogger(tmp_path / name)])
    assert (tmp_path / "ours").read_text() == (tmp_path / "theirs").read_text()


@pytest.mark.parametrize("epochs", [1, 3])
def test_the_lines_of_the_progress_bar_are_those_of_keras(
    epochs: int, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = []
    for way in (keras.Model.fit, bridge.fit):
        fit(fresh(), way, verbose=1, epochs=epochs, validation_data=(X, Y))
        shown = capsys.readouterr().out
        last = [line for line in re.split("[\r\n\b]+", shown) if re.match(r".*13/13|Epoch", line)]
        # The times differ, and in between Keras shows more steps.
        lines.append(
            [re.sub(r"\d+m?u?s(/step)?", "", x) for x in last if "Epoch" in x or "val_" in x]
        )
    assert lines[0] == lines[1]
    assert len(lines[0]) == (1 if epochs == 1 else 2 * epochs)


@pytest.mark.filterwarnings("ignore:Sharding info not provided:UserWarning")
@pytest.mark.parametrize("every", ["epoch", 5])
def test_orbax_checkpoints_are_those_of_keras(every: Any, tmp_path: pathlib.Path) -> None:
    found = []
    for name, way in (("theirs", keras.Model.fit), ("ours", bridge.fit)):
        folder = tmp_path / name
        keras.utils.clear_session()  # names are numbered from 0 again, and are keys
        save = keras.callbacks.OrbaxCheckpoint(
            folder,
            save_freq=every,
            max_to_keep=None,
            save_on_background=False,
        )
        fit(fresh(), way, callbacks=[save])
        read = orbax.checkpoint.PyTreeCheckpointer().restore  # Keras's own way is loose in names
        found.append({x.name: read(x / "pytree") for x in folder.iterdir() if x.name.isdigit()})
    assert len(found[0]) == (2 if every == "epoch" else 5)
    assert found[0].keys() == found[1].keys()
    jax.tree.map(np.testing.assert_array_equal, found[0], found[1])


def chunk_safe_sizes() -> Sizes:
    sizes = Sizes()
    sizes.chunk_safe = True
    return sizes


@pytest.fixture
def without_tensorflow(monkeypatch: pytest.MonkeyPatch) -> None:
    """Allows Keras's TensorBoard without TensorFlow, whose part a mock has."""
    monkeypatch.setattr(_checks, "_require_tensorflow", lambda callback: None)


@pytest.mark.parametrize(
    ("options", "ends"),
    [
        ({}, [13]),
        ({"update_freq": "batch"}, [*range(1, 14)]),
        ({"update_freq": 5}, [5, 10, 13]),
        ({"update_freq": 5, "write_steps_per_second": True}, [*range(1, 14)]),
    ],
)
def test_programs_end_where_something_is_recorded(
    options: dict[str, Any], ends: list[int], without_tensorflow: None, tmp_path: pathlib.Path
) -> None:
    board = keras.callbacks.TensorBoard(tmp_path, write_graph=False, **options)
    board._summary_module = mock.MagicMock()
    programs = chunk_safe_sizes()
    bridge.fit(fresh(), X, Y, batch_size=8, verbose=0, callbacks=[board, programs])
    assert sorted(set(programs.seen)) == ends


def test_programs_begin_and_end_with_what_is_profiled(
    without_tensorflow: None, tmp_path: pathlib.Path
) -> None:
    board = keras.callbacks.TensorBoard(tmp_path, write_graph=False)
    board._summary_module = mock.MagicMock()
    board._start_batch, board._stop_batch, board._should_trace = 4, 6, True
    traced: list[Any] = []
    board._start_trace = lambda: traced.append("start")
    board._stop_trace = lambda: traced.append("stop")
    programs = chunk_safe_sizes()
    bridge.fit(fresh(), X, Y, batch_size=8, verbose=0, callbacks=[board, programs])
    assert {3, 6} < set(programs.seen)


def events(folder: pathlib.Path) -> list[Any]:
    """Reads scalars and histograms from event files: where, what, when, and the bytes."""
    import tensorflow as tf

    found = []
    for path in sorted(folder.rglob("events*")):
        for event in tf.compat.v1.train.summary_iterator(str(path)):
            for value in event.summary.value:
                content = value.tensor.SerializeToString()
                found.append((path.parent.name, value.tag, event.step, content))
    return found


@pytest.mark.adapters
@pytest.mark.parametrize("update_freq", ["epoch", 4])
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # tensorflow 2.20's own, at import
def test_event_files_are_those_of_keras(update_freq: Any, tmp_path: pathlib.Path) -> None:
    pytest.importorskip("tensorflow")
    options = {"update_freq": update_freq, "histogram_freq": 1, "write_images": True}
    for name, way in (("theirs", keras.Model.fit), ("ours", bridge.fit)):
        keras.utils.clear_session()  # names of layers are numbered anew, and are in the files
        board = keras.callbacks.TensorBoard(tmp_path / name, **options)
        exact = {"rewrites": "exact"} if way is bridge.fit else {}
        data = {"validation_data": (X[:40], Y[:40]), "batch_size": 8, "shuffle": False}
        way(fresh(), X, Y, epochs=2, verbose=0, callbacks=[board], **data, **exact)
    ours = events(tmp_path / "ours")
    assert len(ours) > 10
    assert ours == events(tmp_path / "theirs")
