"""Trackers: what they have after kills, read back. `make test-trackers` has them all."""

import collections
import importlib
import json
import os
import pathlib
import random
import signal
import sys
import time
import types
import zipfile
from typing import Any

import numpy as np
import pytest

import functrain as ft
from tests import fork_server

from . import test_loggers, tracked
from .fits import fit, lives

MODULES = {
    "TensorBoard": "tensorboardX",
    "WandB": "wandb",
    "MLflow": "mlflow",
    "Trackio": "trackio",
    "Comet": "comet_ml",
}
Points = list[tuple[str, int, Any]]  # name, step, value
MEDIA = "media"  # the value of a picture or a text


def in_tensorboard(folder: pathlib.Path) -> Points:
    scalars = test_loggers.scalars(folder / "events")
    points = [(name, step, x) for name, values in scalars.items() for step, x in values]
    samples = test_loggers.events(folder / "events")
    points += [("weights", x.step, MEDIA) for x in samples.Images("weights")]
    return points + [("words", x.step, MEDIA) for x in samples.Tensors("words/text_summary")]


def in_wandb(folder: pathlib.Path) -> Points:
    from . import test_wandb  # which is skipped without wandb

    runs = test_wandb.records(folder)
    assert len({name for name, _ in runs}) == 1
    points = [(k, row["_step"], x) for _, rows in runs for row in rows for k, x in row.items()]
    media = [(k.removesuffix("/_type"), step, MEDIA) for k, step, _ in points if "/_type" in k]
    return points + media


def in_mlflow(folder: pathlib.Path) -> Points:
    client = importlib.import_module("mlflow").MlflowClient(f"sqlite:///{folder}/mlflow.db")
    [run] = client.search_runs(["0"])
    assert run.info.status == "FINISHED"
    histories = [client.get_metric_history(run.info.run_id, name) for name in run.data.metrics]
    points = [(x.key, x.step, x.value) for history in histories for x in history]
    for artifact in client.list_artifacts(run.info.run_id, "samples"):
        name, _, step = pathlib.Path(artifact.path).stem.partition("-")
        points.append((name, int(step), MEDIA))
    return points


def in_trackio(folder: pathlib.Path) -> Points:
    program = "import trackio, json; [run] = trackio.Api().runs('p')\n"
    program += "print(json.dumps(trackio.SQLiteStorage.get_logs('p', run.name)))"
    environment = os.environ | {"TRACKIO_DIR": str(folder / "trackio")}
    answer = fork_server.run(
        [sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=True
    )
    rows = json.loads(answer.stdout.splitlines()[-1])
    points = [(name, row["step"], x) for row in rows for name, x in row.items()]
    return [(name, step, MEDIA if isinstance(x, dict) else x) for name, step, x in points]


def in_comet(folder: pathlib.Path) -> Points:
    keys, points = set(), []
    for path in (folder / "comet").glob("[!k]*-[0-9]*.zip"):
        with zipfile.ZipFile(path) as archive:
            about = json.loads(archive.read("experiment.json"))
            keys.add(about["offline_id"])
            assert about["resume_strategy"] == "get_or_create"
            for line in archive.read("messages.json").splitlines():
                message = json.loads(line)
                about = message["payload"]
                if message["type"] == "metric_msg":
                    metric = about["metric"]
                    points.append((metric["metricName"], metric["step"], metric["metricValue"]))
                if message["type"] == "file_upload":
                    name = "weights" if about["upload_type"] == "visualization" else "words"
                    points.append((name, about["additional_params"]["step"], MEDIA))
    assert len(keys) == 1
    return points


READERS = {
    "TensorBoard": in_tensorboard,
    "WandB": in_wandb,
    "MLflow": in_mlflow,
    "Trackio": in_trackio,
    "Comet": in_comet,
}


def points_of(history: Any) -> Points:
    points: Points = []
    for name in ("loss", "learning_rate"):
        points += [(name, i + 1, x) for i, x in enumerate(history.steps[name].tolist())]
    for name, (steps, values) in history.within_epochs.items():
        points += [(name, *pair) for pair in zip(steps.tolist(), values.tolist(), strict=True)]
    for name, values in history.epochs.items():
        if name in ("loss", "learning_rate", "val_loss"):
            points += [(f"epoch/{name}", 20 * (i + 1), x) for i, x in enumerate(values.tolist())]
    points += [(name, step, MEDIA) for name in ("words", "weights") for step in range(9, 61, 9)]
    return points


def begin(name: str, folder: pathlib.Path, *last_step: int) -> Any:
    arguments = [name, str(folder), *map(str, last_step)]
    return fork_server.Popen([sys.executable, tracked.__file__, *arguments])


def kill_one(name: str, folder: pathlib.Path, saves: int, seconds: float, last_step: int) -> None:
    """Starts a run, and kills it some time after it has saved a few checkpoints.

    On a busy machine that may be late, so the run waits at its last step.
    """
    checkpoints = ft.Checkpointer(folder / "checkpoints")
    before = set(checkpoints.steps())
    process = begin(name, folder, last_step)
    deadline = time.monotonic() + 120
    try:
        while len(set(checkpoints.steps()) - before) < saves:
            assert process.poll() is None, "the run ended before its checkpoints"
            assert time.monotonic() < deadline, "the run has not saved its checkpoints"
            time.sleep(0.002)
        time.sleep(seconds)
    finally:
        process.send_signal(signal.SIGKILL)
    assert process.wait(60) == -signal.SIGKILL


@pytest.mark.trackers
@pytest.mark.filterwarnings("default")  # of what the trackers import
@pytest.mark.parametrize("name", MODULES)
def test_a_tracker_holds_what_the_history_holds_after_kills(name, tmp_path) -> None:
    pytest.importorskip(MODULES[name])
    rng = random.Random(name)
    # Between two of these steps are at least as many checkpoints as a kill waits for.
    for last_step in (20, 40, 60):
        kill_one(name, tmp_path, rng.randint(1, 3), rng.uniform(0, 0.1), last_step)
    assert begin(name, tmp_path).wait(120) == 0
    expected = points_of(tracked.run())
    names = {name for name, _, _ in expected}
    points = [point for point in READERS[name](tmp_path) if point[0] in names]
    if name == "TensorBoard":  # which has float32
        expected = [(k, n, x if x == MEDIA else float(np.float32(x))) for k, n, x in expected]
    assert collections.Counter(points) == collections.Counter(expected)


class Memory(ft.hooks.Tracker):
    """A tracker of three methods."""

    def __init__(self, runs: dict[str, Points], **how: Any) -> None:
        super().__init__(**how)
        self.runs = runs
        self.calls: list[str] = []

    def start(self, run_id: str | None) -> tuple[str, dict[str, int]]:
        self.calls.append(f"start {run_id}")
        run_id = run_id or f"run {len(self.runs)}"
        points = self.runs.setdefault(run_id, [])
        return run_id, {name: step for name, step, _ in points}

    def log(self, step: int, values: dict[str, float], samples: dict[str, Any]) -> None:
        assert values or samples
        self.runs[self.run_id] += [(name, step, x) for name, x in values.items()]
        self.runs[self.run_id] += [(name, step, MEDIA) for name in samples]

    def finish(self) -> None:
        self.calls.append("finish")


class Pausing(Memory):
    """One that is finished and continued at each checkpoint."""

    def flush(self) -> None:
        self.pause()


@pytest.mark.parametrize("kind", [Memory, Pausing])
def test_a_tracker_of_three_methods_has_each_value_once_after_several_lives(kind, tmp_path) -> None:
    runs: dict[str, Points] = {}
    loggers = []

    def make() -> list[Any]:
        loggers.append(kind(runs, every=1))
        return [*tracked.sources(), loggers[-1]]

    lives(make, tmp_path, [17, 37], fuse=2)
    expected = points_of(tracked.run())
    [(_, points)] = runs.items()
    assert collections.Counter(points) == collections.Counter(expected)
    assert [log.calls[0] for log in loggers] == ["start None", "start run 0", "start run 0"]
    assert loggers[-1].calls[-1] == "finish"


def test_a_pause_does_not_make_a_resumed_run_log_again_what_the_tracker_has() -> None:
    class AskedOnce(Pausing):
        def start(self, run_id: str | None) -> tuple[str, dict[str, int]]:
            is_restart = bool(self.calls)
            run_id, last_steps = super().start(run_id)
            return run_id, {} if is_restart else last_steps

    def end_epochs(log: Any, *steps: int) -> None:
        for step in steps:
            log(ft.events.EpochEnd(position=ft.Position(step), state=(), values={"loss": 0.5}))

    runs: dict[str, Points] = {}
    killed, resumed = AskedOnce(runs), AskedOnce(runs)
    killed.begin()
    state = killed.state()
    end_epochs(killed, 1, 2, 3)
    resumed.restore(state)
    resumed.begin()
    end_epochs(resumed, 1)
    resumed.state()  # a checkpoint earlier than the killed process would have made its next one
    end_epochs(resumed, 2, 3, 4)
    assert [step for _, step, _ in runs["run 0"]] == [1, 2, 3, 4]


def test_a_second_fit_with_the_same_tracker_is_a_run_of_its_own() -> None:
    runs: dict[str, Points] = {}
    log = Memory(runs, every=1)
    fit(log)
    fit(log)
    assert log.calls == ["start None", "finish"] * 2
    assert runs["run 0"] == runs["run 1"]
    assert log.run_id is None


def test_a_tracker_that_cannot_start_ends_the_run_before_its_first_step() -> None:
    class Down(Memory):
        def start(self, run_id: str | None) -> Any:
            raise ConnectionError("no tracker at this address")

    steps: list[int] = []
    with pytest.raises(ConnectionError, match="no tracker at this address"):
        fit(Down({}), ft.every(steps=1)(lambda event: steps.append(event.step)))
    assert steps == []


def test_a_tracker_that_goes_down_causes_one_warning_and_training_continues() -> None:
    class Flaky(Memory):
        def log(self, step: int, values: Any, samples: Any) -> None:
            raise ConnectionError("no answer")

    with pytest.warns(UserWarning, match=r"Flaky\(\) could not write: .*no answer") as caught:
        _, history = fit(Flaky({}, every=1))
    assert len(caught) == 1
    assert len(history.steps["loss"]) == 60


class FakeWandB:
    """wandb's folders, whose times come from a script."""

    def __init__(self, folder: pathlib.Path, *times: str) -> None:
        self.folder, self.times = folder, iter(times)

    def init(self, id: str = "a", **_: Any) -> Any:
        folder = self.folder / f"offline-run-{next(self.times)}-{id}"
        (folder / "files").mkdir(parents=True)
        (folder / f"run-{id}.wandb").touch()
        files = str(folder / "files")
        return types.SimpleNamespace(id=id, dir=files, offline=True, finish=lambda: None)


def test_wandb_puts_aside_what_the_checkpoint_lacks_whatever_the_clock_says(
    tmp_path, monkeypatch
) -> None:
    fake = FakeWandB(tmp_path, "2", "3", "1", "3", "4")
    monkeypatch.setitem(sys.modules, "wandb", fake)
    first = ft.hooks.WandB()
    first.begin()
    (tmp_path / "offline-run-5-a-b").mkdir()
    (tmp_path / "offline-run-5-a-b" / "run-a-b.wandb").touch()
    state = first.state()
    first.begin()  # killed after it, as are the next two
    for _ in range(3):
        resumed = ft.hooks.WandB()
        resumed.restore(state)
        resumed.begin()
    folders = {path.name.replace("offline-run-", "") for path in tmp_path.iterdir()}
    assert folders == {"2-a", "killed-3-a", "killed-1-a", "killed-killed-3-a", "4-a", "5-a-b"}


class FakeMLflow:
    """MLflow, as far as the hook calls it; with MLFLOW_ENABLE_ASYNC_LOGGING, it logs later."""

    entities = types.SimpleNamespace(Metric=lambda name, value, time, step: (name, value))

    def __init__(self) -> None:
        self.logged: list[Any] = []
        self.MlflowClient = lambda: self

    def start_run(self) -> Any:
        return types.SimpleNamespace(info=types.SimpleNamespace(run_id="a"))

    def get_run(self, run_id: str) -> Any:
        proto = types.SimpleNamespace(metrics=[])
        return types.SimpleNamespace(data=types.SimpleNamespace(to_proto=lambda: proto))

    def log_batch(self, run_id: str, metrics: Any, synchronous: bool | None = None) -> None:
        if synchronous:
            self.logged += metrics

    def end_run(self) -> None:
        pass


def test_mlflow_has_the_values_before_a_checkpoint_even_if_it_logs_later(monkeypatch) -> None:
    fake = FakeMLflow()
    monkeypatch.setitem(sys.modules, "mlflow", fake)
    log = ft.hooks.MLflow()
    log.begin()
    log(ft.events.EpochEnd(position=ft.Position(step=1), state=(), values={"loss": 0.5}))
    log.state()
    assert fake.logged == [("epoch/loss", 0.5)]
