"""Files made to harm: loading runs no code of theirs, follows nothing, and says what is wrong."""

import contextlib
import json
import os
import pathlib
import pickle
import warnings
import zlib
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

import functrain as ft

LIKE = {"x": np.zeros((3, 4)), "y": jnp.zeros(5)}
ERRORS = (ft.CheckpointCorruptError, ft.CheckpointMismatchError)

Edit = Callable[[dict[str, Any]], Any]


@pytest.fixture
def place(tmp_path: pathlib.Path) -> pathlib.Path:
    with ft.Checkpointer(tmp_path / "d") as checkpoints:
        documents = {"hook": {"x": np.ones(3), "n": 1}}
        checkpoints.save(LIKE, 1, values={"loss": 1.0}, documents=documents)
    return tmp_path / "d" / f"{1:012d}"


def edit(place: pathlib.Path, change: Edit, replace: tuple[str, str] = ("", "")) -> None:
    """Rewrites a manifest, with the right digest: an attacker can count, too."""
    path = place / "checkpoint.json"
    body = json.loads(path.read_text())["checkpoint"]
    changed = change(body)
    body = body if changed is None else changed
    text = json.dumps(body, sort_keys=True).replace(*replace)
    digest = f"{zlib.crc32(text.encode()):08x}"
    path.write_text(f'{{"checkpoint": {text}, "crc32": "{digest}"}}')


def require_refused(place: pathlib.Path) -> None:
    """No raw error, whichever way it is read."""
    checkpoints = ft.Checkpointer(place.parent, monitor="loss")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with pytest.raises(ERRORS):
            checkpoints.restore(LIKE)
        with pytest.raises(ERRORS):
            checkpoints.restore(LIKE, 1)
    checkpoints.best()
    with contextlib.suppress(*ERRORS):
        ft.load(place, LIKE)
        checkpoints.verify()


def put(*keys: Any, value: Any) -> Edit:
    def change(body: Any) -> None:
        *above, last = keys
        for key in above:
            body = body[key]
        body[last] = value

    return change


X, HOOK = ("leaves", "state/x"), ("leaves", "documents/hook/x")
SHARD = (*X, "shards", 0)
HALF = f"{zlib.crc32(bytes(48)):08x}"  # the checksum of six zeros
EDITS: dict[str, Edit] = {
    "no body": lambda body: [],
    "values of text": put("values", "loss", value="high"),
    "a document of no array": put("documents", "hook", value={"$array": "documents/hook/nothing"}),
    "a document of half an item": put("documents", "hook", value={"$items": [1]}),
    "a key of a class": put(
        "documents", "hook", value={"$array": "documents/hook/x", "$key": "os.system"}
    ),
    "a dtype of code": put(*HOOK, "spec", value="__import__('os')[3]"),
    "objects": put(*HOOK, "spec", value="object[3]"),
    "a shape bomb": put(*HOOK, "spec", value=f"float64[{10**15}]"),
    "a bomb with a part of its size": lambda body: body["leaves"]["documents/hook/x"].update(
        spec=f"uint8[{10**15}]", shards=[[0, 0, f"0:{10**15}", ["00000000"]]]
    ),
    "another file": put(*SHARD, 0, value=7),
    "a file elsewhere": put(*SHARD, 0, value="/../../../etc/passwd"),
    "an offset beyond the end": put(*SHARD, 1, value=10**9),
    "the same part twice": lambda body: body["leaves"]["state/x"].update(
        shards=[[*body["leaves"]["state/x"]["shards"][0][:2], "0:3,0:2", HALF]] * 2
    ),
    "no parts": put(*X, "shards", value=[]),
    "another digest": put(*SHARD, 3, value=["00000000"]),
}


@pytest.mark.parametrize("name", EDITS)
def test_a_manifest_that_makes_no_sense_is_refused_in_words(place, name) -> None:
    edit(place, EDITS[name])
    require_refused(place)


def test_a_document_that_is_nested_too_deep_is_refused_in_words(place) -> None:
    nested = '{"$tuple": [' * 5000 + "1" + "]}" * 5000
    edit(place, put("documents", "hook", value="deep"), ('"deep"', nested))
    require_refused(place)


TEXTS = {
    "nothing": "",
    "no JSON": "\x80\x04\x95",
    "a number without end": '{"checkpoint": {"format": ' + "9" * 100_000 + "}}",
}


@pytest.mark.parametrize("name", TEXTS)
def test_a_text_that_is_no_manifest_is_refused_in_words(place, name) -> None:
    (place / "checkpoint.json").write_text(TEXTS[name], encoding="latin-1")
    require_refused(place)


class Bomb:
    """Unpickled, it leaves a file behind."""

    def __init__(self, path: pathlib.Path) -> None:
        self._path = str(path)

    def __reduce__(self) -> Any:
        return os.mkdir, (self._path,)


def test_no_pickle_is_loaded_wherever_it_stands(place, tmp_path) -> None:
    pickled = pickle.dumps(Bomb(tmp_path / "ran"))
    for path in sorted(place.iterdir()):
        before = path.read_bytes()
        path.write_bytes(pickled)
        with pytest.raises(ERRORS):
            ft.load(place, LIKE)
        path.write_bytes(before)
    for name in ("state.pkl", "__init__.py", "x.npy", "arrays-1-ab.safetensors"):
        (place / name).write_bytes(pickled)
    assert ft.load(place, LIKE)["x"].shape == (3, 4)
    assert ft.Checkpointer(place.parent).verify() == {}
    assert not (tmp_path / "ran").exists()
    pickle.loads(pickled)
    assert (tmp_path / "ran").exists()  # it would have been


def test_another_format_says_which_version_reads_it(place) -> None:
    edit(place, lambda body: body | {"format": 9, "run": {"functrain": "9.1"}, "leaves": "new"})
    with pytest.raises(
        ft.CheckpointMismatchError,
        match=r"format 3, got one of format 9, written by functrain 9\.1\. Load it with",
    ):
        ft.load(place, LIKE)
    checkpoints = ft.Checkpointer(place.parent, monitor="loss")
    with pytest.raises(ft.CheckpointMismatchError, match="functrain 9"):
        checkpoints.restore(LIKE)
    assert checkpoints.best() is None
    assert checkpoints.steps() == [1]
