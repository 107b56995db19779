"""What is kept: the newest, and the best finite value; a rollback is explicit."""

import math
import os
import pathlib
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

import functrain as ft

LIKE = {"x": np.zeros(3)}


def saved(directory: Any, losses: list[float], **how: Any) -> ft.Checkpointer:
    checkpoints = ft.Checkpointer(directory, monitor="loss", **how)
    for step, loss in enumerate(losses):
        checkpoints.save({"x": np.full(3, step)}, step, values={"loss": loss})
    return checkpoints


NAN = math.nan
HISTORIES = {
    "with a nan": [1, NAN, 2, 3],
    "worsening": [1, 2, 3, 4, 5],
    "bettering": [5, 4, 3, 2, 1],
    "nan first": [NAN, NAN, 3, 2, 4],
    "nan alone": [NAN, NAN, NAN, NAN],
    "equal": [2, 1, 1, 1, 1],
    "infinite": [math.inf, 1, -math.inf, 0, 0],
}


@pytest.mark.parametrize("keep", [1, 2])
@pytest.mark.parametrize("mode", ["min", "max"])
@pytest.mark.parametrize("name", HISTORIES)
def test_the_newest_and_the_best_are_kept_in_this_life_and_the_next(
    tmp_path, name, mode, keep
) -> None:
    losses = [float(x) for x in HISTORIES[name]]
    for n in range(1, len(losses) + 1):
        with saved(tmp_path / str(n), losses[: n - 1], mode=mode, keep=keep):
            pass
        with ft.Checkpointer(
            tmp_path / str(n), monitor="loss", mode=mode, keep=keep
        ) as checkpoints:
            checkpoints.save({"x": np.full(3, n - 1)}, n - 1, values={"loss": losses[n - 1]})
            known = {i: x for i, x in enumerate(losses[:n]) if math.isfinite(x)}
            choose = min if mode == "min" else max
            best = choose(known, key=known.__getitem__) if known else None
            newest = list(range(n))[-keep:]
            assert checkpoints.best() == best
            assert checkpoints.steps() == sorted({*newest, *({best} - {None})})
            for step in checkpoints.steps():
                assert np.all(
                    checkpoints.restore(LIKE | {"x": np.zeros(3, int)}, step).state["x"] == step
                )


def test_multiples_of_keep_every_are_kept_besides_the_newest_and_the_best(tmp_path) -> None:
    losses = [float(x) for x in (9, 9, 9, 1, 9, 9, 9, 9, 9, 9, 9, 9)]
    with saved(tmp_path, losses, keep=2, keep_every=5) as checkpoints:
        assert checkpoints.steps() == [0, 3, 5, 10, 11]
    with saved(tmp_path / "not due", losses[:1], keep=1, keep_every=5) as checkpoints:
        for step in (6, 12, 15, 18):
            checkpoints.save(LIKE, step, values={"loss": 9.5})
        assert checkpoints.steps() == [0, 15, 18]
    assert "keep=1, keep_every=5, monitor='loss'" in repr(checkpoints)


def test_a_value_that_only_equals_the_best_or_is_nan_is_no_improvement(tmp_path) -> None:
    checkpoints = ft.Checkpointer(tmp_path, monitor="loss")
    assert not checkpoints._is_improved({"loss": NAN})
    assert checkpoints._is_improved({"loss": 2.0})
    checkpoints.save(LIKE, 1, values={"loss": 2.0})
    assert not checkpoints._is_improved({"loss": 2.0})
    assert not checkpoints._is_improved({"loss": NAN})
    assert not checkpoints._is_improved({"other": 0.0})
    assert checkpoints._is_improved({"loss": 1.0})
    checkpoints.close()


def test_documents_with_arrays_of_like_names_and_any_name_come_back(tmp_path) -> None:
    one, two = np.ones(2), np.full(3, 2)
    documents = {
        "state": {"x": one},
        "a/b": {"x": two, "x/y": one, "": two},
        "hook": {"a/b": one, "a": {"b": two}, "numbers": {1: one, "1": two, (1, "2"): one}},
        "text": ["\ud800", "\0", "é", 2**70, -0.0, math.inf, b"\xff", None, True, (1, [2])],
    }
    with ft.Checkpointer(tmp_path) as checkpoints:
        checkpoints.save({"x": np.zeros(5)}, 1, documents=documents)
        found = checkpoints.restore({"x": np.ones(5)})
        assert np.all(found.state["x"] == 0)
        np.testing.assert_equal(found.documents, documents)
        assert checkpoints.verify() == {}


def test_an_earlier_step_is_refused_until_a_rollback_says_so(tmp_path) -> None:
    checkpoints = saved(tmp_path, [3.0, 2.0, 1.0, 4.0], keep=None)
    with pytest.raises(ValueError, match=r"a step after 3.*got 1.*rollback\(1\)"):
        checkpoints.save(LIKE, 1)
    assert checkpoints.steps() == [0, 1, 2, 3]
    with pytest.raises(FileNotFoundError, match="expected a checkpoint, got nothing"):
        checkpoints.rollback(9)
    checkpoints.rollback(1)
    assert (checkpoints.steps(), checkpoints.latest(), checkpoints.best()) == ([0, 1], 1, 1)
    checkpoints.save(LIKE, 2, values={"loss": 5.0})
    assert checkpoints.restore(LIKE).values == {"loss": 5.0}
    assert checkpoints.best() == 1
    checkpoints.close()


def test_a_rollback_to_a_damaged_checkpoint_removes_nothing(tmp_path) -> None:
    checkpoints = saved(tmp_path, [3.0, 2.0, 1.0], keep=None)
    for path in pathlib.Path(tmp_path, f"{1:012d}").rglob("*"):
        if path.is_file() and path.name != "checkpoint.json":
            path.write_bytes(b"")
    with pytest.raises(ft.CheckpointCorruptError):
        checkpoints.rollback(1)
    assert checkpoints.steps() == [0, 1, 2]
    checkpoints.close()


def test_an_earlier_step_is_refused_while_a_later_one_is_being_saved(tmp_path) -> None:
    with ft.Checkpointer(tmp_path, keep=1) as checkpoints:
        checkpoints.save({"x": np.zeros(1_000_000)}, 20, wait=False)
        with pytest.raises(ValueError, match=r"expected a step after 20.*got 10"):
            checkpoints.save(LIKE, 10)
        assert checkpoints.steps() == [20]


def test_a_step_of_more_digits_than_a_name_has_is_refused_before_anything_is_written(
    tmp_path,
) -> None:
    with ft.Checkpointer(tmp_path / "run") as checkpoints:
        with pytest.raises(ValueError, match="at most twelve digits"):
            checkpoints.save(LIKE, 10**12)
        assert not (tmp_path / "run").exists()
        checkpoints.save(LIKE, 10**12 - 1)
        assert checkpoints.steps() == [10**12 - 1]


def test_an_old_checkpoint_that_cannot_be_removed_is_a_warning_and_removed_later(
    tmp_path, monkeypatch
) -> None:
    remove = os.remove

    def refuse(path):
        if f"{1:012d}" in path:
            raise PermissionError("it is in use")
        remove(path)

    with ft.Checkpointer(tmp_path, keep=1) as checkpoints:
        checkpoints.save(LIKE, 1)
        with monkeypatch.context() as patch:
            patch.setattr(os, "remove", refuse)
            with pytest.warns(UserWarning, match=r"0001: .*in use"):
                checkpoints.save(LIKE, 2)
        assert checkpoints.steps() == [1, 2]
        checkpoints.save(LIKE, 3)
        assert checkpoints.steps() == [3]


def test_files_that_cannot_be_deleted_yet_are_left_to_the_next_writer(
    tmp_path, monkeypatch
) -> None:
    with ft.Checkpointer(tmp_path, keep=1) as checkpoints:
        checkpoints.save(LIKE, 1)
        with monkeypatch.context() as patch:
            patch.setattr(os, "rmdir", lambda *_, **__: os.listdir("it is not empty"))
            checkpoints.save(LIKE, 2)
        assert checkpoints.steps() == [2]
    with ft.Checkpointer(tmp_path, keep=1) as checkpoints:
        checkpoints.save(LIKE, 3)
    assert sorted(os.listdir(tmp_path)) == [f"{3:012d}", ".functrain-lock"][::-1]


def test_a_damaged_checkpoint_is_never_the_best(tmp_path) -> None:
    checkpoints = saved(tmp_path, [3.0, 1.0, 2.0], keep=None)
    checkpoints.close()
    pathlib.Path(tmp_path, f"{1:012d}", "checkpoint.json").write_text("{}")
    again = ft.Checkpointer(tmp_path, monitor="loss", keep=None)
    assert again.best() == 2
    assert again.steps() == [0, 1, 2]
    assert list(again.verify()) == [1]


def test_after_a_rollback_another_checkpointer_may_write(tmp_path) -> None:
    like, first = {"w": jnp.zeros(2)}, ft.Checkpointer(tmp_path)
    for step in (1, 2):
        first.save(like, step)
    first.rollback(1)
    with pytest.raises(ValueError, match="step: "):
        first.rollback(-1)
    with ft.Checkpointer(tmp_path) as second:
        second.save(like, 2)
    assert first.steps() == [1, 2]
