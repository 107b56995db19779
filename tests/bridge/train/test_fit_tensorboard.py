"""TensorBoard around fused steps writes what it writes under Keras, and costs no fusion."""

import bridge  # isort: skip  # before keras: it chooses the backend

import pathlib
from typing import Any
from unittest import mock

import keras
import pytest

from tests.bridge.fitting import X, Y, fresh


class Programs(keras.callbacks.Callback):
    """Counts the steps that were taken when a batch's end is told."""

    chunk_safe = True

    def on_train_begin(self, logs: Any = None) -> None:
        self.seen: list[int] = []

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self.seen.append(int(self.model.optimizer.iterations.value))


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
    options: dict[str, Any], ends: list[int], tmp_path: pathlib.Path
) -> None:
    board = keras.callbacks.TensorBoard(tmp_path, write_graph=False, **options)
    board._summary_module = mock.MagicMock()
    programs = Programs()
    bridge.fit(fresh(), X, Y, batch_size=8, verbose=0, callbacks=[board, programs])
    assert sorted(set(programs.seen)) == ends


def test_programs_begin_and_end_with_what_is_profiled(tmp_path: pathlib.Path) -> None:
    board = keras.callbacks.TensorBoard(tmp_path, write_graph=False)
    board._summary_module = mock.MagicMock()
    board._start_batch, board._stop_batch, board._should_trace = 4, 6, True
    traced: list[Any] = []
    board._start_trace = lambda: traced.append("start")
    board._stop_trace = lambda: traced.append("stop")
    programs = Programs()
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
        board = keras.callbacks.TensorBoard(tmp_path / name, **options)
        exact = {"rewrites": "exact"} if way is bridge.fit else {}
        data = {"validation_data": (X[:40], Y[:40]), "batch_size": 8, "shuffle": False}
        way(fresh(), X, Y, epochs=2, verbose=0, callbacks=[board], **data, **exact)
    ours = events(tmp_path / "ours")
    assert len(ours) > 10
    assert ours == events(tmp_path / "theirs")
