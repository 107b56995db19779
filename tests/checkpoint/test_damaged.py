"""Damaged bytes never come back as weights: the original does, an older step, or an error."""

import contextlib
import os
import pathlib
import random
import warnings
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

import functrain as ft
from functrain.checkpoint._errors import CheckpointCorruptError
from tests.checkpoint.storages import train
from tests.conftest import digest


def state_of(step: int) -> dict[str, Any]:
    return {
        "w": jnp.arange(600, dtype=jnp.float32).reshape(20, 30) + step,
        "half": jnp.full((7, 5), step, jnp.bfloat16),
        "nibbles": np.full(9, step, ml_dtypes.uint4),
        "key": jax.random.key(step),
        "step": np.int64(step),
        "large": np.random.default_rng(step).standard_normal(5000),
    }


DIGESTS = {step: digest(state_of(step)) for step in (1, 2)}
LIKE = state_of(0)


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> ft.Checkpointer:
    checkpoints = ft.Checkpointer(tmp_path_factory.mktemp("saved"))
    for step in (1, 2):
        documents = {"here": {"x": np.full(50, step), "n": step}}
        checkpoints.save(state_of(step), step, values={"loss": 1 / step}, documents=documents)
    checkpoints.close()
    return checkpoints


def files_of(checkpoints: ft.Checkpointer, step: int) -> list[pathlib.Path]:
    folder = pathlib.Path(checkpoints.directory, f"{step:012d}")
    found = sorted(path for path in folder.rglob("*") if path.is_file())
    assert len(found) == 2
    return found


def flip(content: bytes, at: int, bit: int) -> bytes:
    return content[:at] + bytes([content[at] ^ 1 << bit]) + content[at + 1 :]


def damages_to(content: bytes, flips: int) -> Iterator[bytes]:
    """Bits flipped at the ends and in between; cut off; nothing but zeros."""
    chance = random.Random(len(content))
    places = [0, len(content) - 1, *(chance.randrange(len(content)) for _ in range(flips - 2))]
    yield from (flip(content, at, chance.randrange(8)) for at in places)
    yield from (content[: len(content) // 2], b"", bytes(len(content)))


@contextlib.contextmanager
def damaged(path: pathlib.Path, content: bytes) -> Iterator[None]:
    before = path.read_bytes()
    try:
        path.write_bytes(content)
        yield
    finally:
        path.write_bytes(before)


def require_never_wrong(checkpoints: ft.Checkpointer, path: pathlib.Path) -> bool:
    """Returns whether the damage was met."""
    folder = os.path.join(checkpoints.directory, f"{2:012d}")
    reason = ""
    try:
        assert digest(ft.load(folder, LIKE)) == DIGESTS[2]
    except CheckpointCorruptError as error:
        reason = str(error)
    named = [name for name in LIKE if f"the bytes of {name} as saved" in reason]
    assert named or not reason or path.name in reason, reason
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        state, position, values, documents = checkpoints.restore(LIKE)
    step = position.step
    assert digest(state) == DIGESTS[step]
    assert values == {"loss": 1 / step}
    assert documents["here"]["n"] == step
    np.testing.assert_array_equal(documents["here"]["x"], np.full(50, step))
    assert (step == 1) == any("Passed over" in str(w.message) for w in said)
    assert 2 in checkpoints.verify(2) or path.name == "checkpoint.json"  # that has white space
    assert step == 1 or not reason
    return step == 1


@pytest.mark.parametrize("flips", [4, pytest.param(60, marks=pytest.mark.long)])
def test_no_damage_to_any_file_brings_a_wrong_byte(saved: ft.Checkpointer, flips: int) -> None:
    met = 0
    for path in files_of(saved, 2):
        content = path.read_bytes()
        for damage in damages_to(content, flips):
            if damage != content:
                with damaged(path, damage):
                    met += require_never_wrong(saved, path)
    assert met > 8
    assert saved.verify() == {}


def test_every_bit_of_what_a_checkpoint_says_of_itself_counts(saved: ft.Checkpointer) -> None:
    path = pathlib.Path(saved.directory, f"{2:012d}", "checkpoint.json")
    content = path.read_bytes()
    for at in range(0, len(content), 23):
        with damaged(path, flip(content, at, at % 8)):
            found = saved.verify(2)
            assert not found or "checkpoint.json" in found[2]
            if not found:  # white space
                assert digest(ft.load(path.parent, LIKE)) == DIGESTS[2]
    with damaged(path, content.replace(b'"loss": 0.5', b'"loss": 0.4')):
        assert "checksum" in saved.verify(2)[2]


def test_all_damaged_is_an_error_that_says_of_each_what_is_wrong(saved: ft.Checkpointer) -> None:
    with contextlib.ExitStack() as stack:
        for step in (1, 2):
            stack.enter_context(damaged(files_of(saved, step)[-1], b"lorem ipsum"))
        with pytest.raises(
            CheckpointCorruptError, match=r"(?s)all are damaged.*0002.*0001"
        ) as error:
            saved.restore(LIKE)
        assert "process" not in str(error.value).replace(saved.directory, "")  # there is one
        assert sorted(saved.verify()) == [1, 2]


def test_steps_that_were_renamed_are_damaged_wherever_they_are_read(tmp_path) -> None:
    with ft.Checkpointer(tmp_path, keep=None) as checkpoints:
        for step in (1, 2, 3):
            checkpoints.save({"x": jnp.full(3, step)}, step)
    one, three = tmp_path / f"{1:012d}", tmp_path / f"{3:012d}"
    one.rename(tmp_path / "moved")
    three.rename(one)
    (tmp_path / "moved").rename(three)
    like = {"x": jnp.zeros(3, jnp.int32)}
    with pytest.raises(CheckpointCorruptError, match="it is the checkpoint of step 1"):
        checkpoints.restore(like, step=3)
    assert sorted(checkpoints.verify()) == [1, 3]
    with pytest.warns(UserWarning, match="Passed over"):
        assert checkpoints.restore(like).position.step == 2
    with pytest.warns(UserWarning, match="Passed over"):
        assert ft.warm_start(like, tmp_path).state["x"].tolist() == [2, 2, 2]
    with pytest.raises(CheckpointCorruptError, match="of step 1"):
        ft.load(three, like)
    assert ft.load(three.rename(tmp_path / "best"), like)["x"].tolist() == [1, 1, 1]


@contextlib.contextmanager
def as_nobody(directory: pathlib.Path) -> Iterator[None]:
    """Owns a directory without the rights of root, who may read what has mode 0."""
    if os.geteuid():
        yield
        return
    for path in directory.parents:
        path.chmod(path.stat().st_mode | 0o711)
    for path in (directory, *directory.rglob("*")):
        os.chown(path, 65534, -1)
    os.seteuid(65534)
    try:
        yield
    finally:
        os.seteuid(0)


@pytest.mark.parametrize("name", ["", "checkpoint.json", "arrays-0-*.safetensors"])
def test_what_may_not_be_read_is_not_damaged(tmp_path, name) -> None:
    run = tmp_path / "run"
    train(run, epochs=2)
    before = sorted(os.listdir(run))
    (newest,) = (run / f"{6:012d}").glob(name) if name else [run / f"{6:012d}"]
    mode = newest.stat().st_mode
    newest.chmod(0)
    with as_nobody(run):
        for read in (lambda: train(run), ft.Checkpointer(run).verify):
            with pytest.raises(PermissionError, match=f"{6:012d}"):
                read()
    newest.chmod(mode)
    assert sorted(os.listdir(run)) == before
    assert train(run).state.step == 9
