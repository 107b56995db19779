"""TensorBoard around fused steps writes what it writes under Keras, and costs no fusion."""

import bridge  # isort: skip  # before keras: it chooses the backend

import contextlib
import pathlib
from collections.abc import Callable, Iterator
from typing import Any

import keras
import numpy as np
import pytest
from keras import layers

RNG = np.random.default_rng(0)
X = RNG.normal(size=(104, 8)).astype(np.float32)
Y = RNG.normal(size=(104, 4)).astype(np.float32)


class Summaries:
    """What `tf.summary` does for the callback, without TensorFlow: notes what is written.

    There is a default writer, with a step, and a condition on whether anything is recorded.
    """

    def __init__(self) -> None:
        self.written: list[tuple[str, str, int, float]] = []
        self._writers: list[tuple[str, Any]] = []
        self._conditions: list[Callable[[], bool]] = []

    def create_file_writer(self, folder: str) -> "Writer":
        return Writer(self, pathlib.Path(folder).name)

    @contextlib.contextmanager
    def record_if(self, condition: Callable[[], bool]) -> Iterator[None]:
        self._conditions.append(condition)
        yield
        self._conditions.pop()

    def scalar(self, name: str, value: Any, step: Any = None) -> None:
        if self._writers and all(condition() for condition in self._conditions):
            folder, default = self._writers[-1]
            now = default if step is None else step
            self.written.append((folder, name, int(now), float(value)))


class Writer:
    def __init__(self, summaries: Summaries, folder: str) -> None:
        self._summaries, self._folder = summaries, folder

    @contextlib.contextmanager
    def as_default(self, step: Any = None) -> Iterator[None]:
        self._summaries._writers.append((self._folder, step))
        yield
        self._summaries._writers.pop()

    def flush(self) -> None: ...

    def close(self) -> None: ...


class OwnSummaries(keras.callbacks.Callback):
    """A user's: writes something of the weights, at the steps at which TensorBoard records."""

    chunk_safe = True

    def __init__(self, summaries: Any) -> None:
        super().__init__()
        self.summaries = summaries

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        norm = np.abs(np.asarray(self.model.layers[0].kernel.value)).sum()
        self.summaries.scalar("norm", norm)


class Programs(keras.callbacks.Callback):
    """Counts the steps that were taken when a batch's end is told."""

    chunk_safe = True

    def on_train_begin(self, logs: Any = None) -> None:
        self.seen: list[int] = []

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self.seen.append(int(self.model.optimizer.iterations.value))


def fresh() -> keras.Model:
    keras.utils.clear_session()
    keras.utils.set_random_seed(0)
    model = keras.Sequential([keras.Input((8,)), layers.Dense(8, "relu"), layers.Dense(4)])
    model.compile("adam", "mse", metrics=["mae"])
    return model


def written(way: Any, folder: pathlib.Path, **options: Any) -> list[Any]:
    summaries = Summaries()
    board = keras.callbacks.TensorBoard(folder, write_graph=False, **options)
    board._summary_module = summaries
    exact = {"rewrites": "exact"} if way is bridge.fit else {}
    callbacks = [board, OwnSummaries(summaries)]
    data = {"validation_data": (X[:40], Y[:40]), "batch_size": 8, "shuffle": False}
    way(fresh(), X, Y, epochs=2, verbose=0, callbacks=callbacks, **data, **exact)
    return [row for row in summaries.written if row[1] != "batch_steps_per_second"]


@pytest.mark.parametrize("update_freq", ["epoch", "batch", 4])
def test_the_summaries_are_those_of_keras(update_freq: Any, tmp_path: pathlib.Path) -> None:
    ours = written(bridge.fit, tmp_path, update_freq=update_freq)
    assert ours == written(keras.Model.fit, tmp_path, update_freq=update_freq)
    steps = {step for _, name, step, _ in ours if name == "norm"}
    assert (
        steps == {"epoch": set(), "batch": {*range(1, 27)}, 4: {4, 8, 12, 16, 20, 24}}[update_freq]
    )


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
    board._summary_module = Summaries()
    programs = Programs()
    bridge.fit(fresh(), X, Y, batch_size=8, verbose=0, callbacks=[board, programs])
    assert sorted(set(programs.seen)) == ends


def test_programs_begin_and_end_with_what_is_profiled(tmp_path: pathlib.Path) -> None:
    board = keras.callbacks.TensorBoard(tmp_path, write_graph=False)
    board._summary_module = Summaries()
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
