"""What wandb has kept, offline. `make test-adapters` has it; elsewhere this is skipped."""

import contextlib
import json
import pathlib
import struct
import time
from typing import Any

import pytest

import functrain as ft

from .fits import EVAL, LOADER, fit, lives

wandb = pytest.importorskip("wandb")
pytestmark = [
    pytest.mark.adapters,
    # wandb 0.31, of what it imports and how it talks to its service.
    pytest.mark.filterwarnings("default"),
]


def records(folder: pathlib.Path) -> list[tuple[str, list[dict[str, Any]]]]:
    """Reads each run of a folder: its id, and what it logged, in wandb's own messages."""
    from google.protobuf.message import DecodeError
    from wandb.proto.wandb_internal_pb2 import Record

    found = []
    for path in sorted(folder.glob("wandb/offline-run-*/*.wandb"), key=lambda p: p.stat().st_mtime):
        log: list[Any] = []
        # `finish` does not wait for the service, which writes the file.
        deadline = time.monotonic() + 60
        while not (log and log[-1].HasField("exit")):
            assert time.monotonic() < deadline, f"{path} has no end"
            time.sleep(0.05)
            with contextlib.suppress(DecodeError):  # of a record that is half written
                log = [Record.FromString(text) for text in leveldb_log(path.read_bytes()[7:])]
        rows = []
        for record in log:
            if record.HasField("history"):
                items = record.history.item
                rows.append({item.key or "/".join(item.nested_key): item for item in items})
        found.append((path.stem.removeprefix("run-"), [numbers(row) for row in rows]))
    return found


def numbers(row: dict[str, Any]) -> dict[str, Any]:
    return {name: json.loads(item.value_json) for name, item in row.items()}


def leveldb_log(data: bytes) -> list[bytes]:
    """Splits a file in LevelDB's log format, in which wandb keeps its records."""
    found, at, parts = [], 0, []
    while at + 7 <= len(data):
        room = 32768 - (at + 7) % 32768  # the file's own header counts
        if room < 7:
            at += room
            continue
        length, kind = struct.unpack("<HB", data[at + 4 : at + 7])
        parts.append(data[at + 7 : at + 7 + length])
        at += 7 + length
        if kind in (1, 4):  # whole, or the last part
            found.append(b"".join(parts))
            parts = []
    return found


def logger(folder: pathlib.Path) -> Any:
    settings = wandb.Settings(silent=True, console="off")
    return ft.hooks.WandB(
        every=4, project="p", mode="offline", dir=str(folder), settings=settings, config={"k": 3}
    )


def test_a_run_of_wandb_holds_what_the_history_holds(tmp_path) -> None:
    evaluation = ft.hooks.Evaluate(EVAL, LOADER, every=ft.every(steps=10))
    sample = ft.hooks.Sample(lambda state: {"words": "a < b"}, every=ft.at(20))
    _, history = fit(evaluation, sample, logger(tmp_path))
    [(_, rows)] = records(tmp_path)
    losses = {row["_step"]: row["loss"] for row in rows if "loss" in row}
    assert list(losses) == list(range(4, 61, 4))
    assert list(losses.values()) == history.steps["loss"][3::4].tolist()
    values = {row["_step"]: row["val_loss"] for row in rows if "val_loss" in row}
    steps, expected = history.within_epochs["val_loss"]
    assert values == dict(zip(steps.tolist(), expected.tolist(), strict=True))
    epochs = {row["_step"]: row["epoch/loss"] for row in rows if "epoch/loss" in row}
    assert epochs == dict(zip([20, 40, 60], history.epochs["loss"].tolist(), strict=True))
    assert [row["_step"] for row in rows if any("words" in name for name in row)] == [20]


def test_a_run_that_was_killed_goes_on_under_its_id_with_the_same_numbers(tmp_path) -> None:
    lives(lambda: [logger(tmp_path / "a")], tmp_path / "checkpoints", [37])
    fit(logger(tmp_path / "b"))
    [(_, straight)] = records(tmp_path / "b")
    runs = records(tmp_path / "a")
    assert len({name for name, _ in runs}) == 1
    # A checkpoint ends a folder; that of the first life which was begun after it is put aside.
    for name in ("loss", "epoch/loss"):
        found = [(row["_step"], row[name]) for _, rows in runs for row in rows if name in row]
        assert found == [(row["_step"], row[name]) for row in straight if name in row]
    assert len(list(tmp_path.glob("a/wandb/killed-offline-run-*"))) == 1
