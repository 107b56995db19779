"""Files made to harm: loading runs no code of theirs, follows nothing, and says what is wrong."""

import contextlib
import json
import os
import pathlib
import pickle
import resource
import shutil
import sys
import warnings
import zlib
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

import functrain as ft
from functrain.checkpoint import _arrays

LIKE = {"x": np.zeros((3, 4)), "y": jnp.zeros(5)}
ERRORS = (ft.CheckpointCorruptError, ft.CheckpointMismatchError)

Edit = Callable[[dict[str, Any]], Any]


@pytest.fixture
def place(tmp_path: pathlib.Path) -> pathlib.Path:
    with ft.Checkpointer(tmp_path / "d") as checkpoints:
        documents = {"hook": {"x": np.ones(3), "n": 1}}
        checkpoints.save(LIKE, 1, values={"loss": 1.0}, documents=documents)
    return tmp_path / "d" / f"{1:012d}"


def seal(text: str) -> str:
    return f"{zlib.crc32(text.encode()):08x}"


def edit(place: pathlib.Path, change: Edit, replace: tuple[str, str] = ("", "")) -> None:
    """Rewrites what a checkpoint says, with the right digest: an attacker can count, too."""
    path = place / "checkpoint.json"
    body = json.loads(path.read_text())["checkpoint"]
    changed = change(body)
    body = body if changed is None else changed
    text = json.dumps(body, sort_keys=True, ensure_ascii=False).replace(*replace)
    path.write_text(f'{{"checkpoint": {text}, "crc32": "{seal(text)}"}}')


def require_refused(place: pathlib.Path) -> None:
    """No raw error, whichever way it is read."""
    checkpoints = ft.Checkpointer(place.parent, best="loss")
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


def drop(*keys: Any) -> Edit:
    def change(body: Any) -> None:
        *above, last = keys
        for key in above:
            body = body[key]
        del body[last]

    return change


HOOK = ("documents", "hook")
CLASS = {"__class__": "os.system", "__reduce__": ["os.system", ["touch ran"]]}
WORDS: dict[str, Edit] = {
    "no body": lambda body: [],
    "a text": lambda body: "checkpoint",
    "a class": lambda body: CLASS,
    "format of text": put("format", value="1"),
    "format of a list": put("format", value=[9]),
    "format 0": put("format", value=0),
    "no leaves": drop("leaves"),
    "leaves of a list": put("leaves", value=[]),
    "a leaf of a class": put("leaves", "state/x", value=CLASS),
    "a leaf of text": put("leaves", "state/x", value="float64[3, 4]"),
    "no digest": drop("leaves", "state/x", "crc32"),
    "another digest": put("leaves", "state/x", "crc32", value="00000000"),
    "a digest of a list": put("leaves", "state/x", "crc32", value=["00000000"]),
    "a dtype of code": put("leaves", "documents/hook/x", "spec", value="__import__('os')[3]"),
    "objects": put("leaves", "documents/hook/x", "spec", value="object[3]"),
    "another dtype": put("leaves", "documents/hook/x", "spec", value="float32[3]"),
    "a shape bomb": put("leaves", "documents/hook/x", "spec", value=f"float64[{10**15}]"),
    "a larger bomb": put("leaves", "documents/hook/x", "spec", value=f"float64[{10**30}, 9]"),
    "many axes": put("leaves", "documents/hook/x", "spec", value=f"int8[{', '.join('2' * 40)}]"),
    "a longer number": put("leaves", "documents/hook/x", "spec", value="int8[" + "9" * 5000 + "]"),
    "a negative shape": put("leaves", "documents/hook/x", "spec", value="float64[-3]"),
    "stored as objects": put("leaves", "state/x", "stored", value="object[3]"),
    "a leaf elsewhere": put(
        "leaves", "state/../../../etc/passwd", value={"spec": "int8[1]", "crc32": "0"}
    ),
    "position of text": put("position", value="9"),
    "position with a class": put("position", value=CLASS),
    "position below 0": put("position", "step", value=-1),
    "position of true": put("position", "step", value=True),
    "values of a list": put("values", value=[1]),
    "values of text": put("values", "loss", value="1"),
    "values that are an array": put("values", value={"$array": 1.0}),
    "values of an array": put("values", "loss", value={"$array": "state/x"}),
    "trees of text": put("trees", value="state"),
    "trees of numbers": put("trees", value=[1]),
    "run of text": put("run", value="me"),
    "documents of a list": put("documents", value=[1]),
    "a document of no array": put(*HOOK, value={"$array": "documents/hook/nothing"}),
    "a document of the state's": put(*HOOK, value={"$array": "state/x"}),
    "a document with an array of a list": put(*HOOK, value={"$array": []}),
    "a document of half an item": put(*HOOK, value={"$items": [1]}),
    "a document of no items": put(*HOOK, value={"$items": 3}),
    "a document with a list for a key": put(*HOOK, value={"$items": [[[1], 2]]}),
    "a document of no bytes": put(*HOOK, value={"$bytes": 3}),
    "a document of no float": put(*HOOK, value={"$float": "one"}),
    "a document of a key of a class": put(
        *HOOK, value={"$array": "documents/hook/x", "$key": "os.system"}
    ),
    "a document of a tensor of text": put(*HOOK, value={"$tensor": "os.system"}),
}


@pytest.mark.parametrize("name", WORDS)
def test_words_that_make_no_sense_are_refused_in_words(place, name, monkeypatch) -> None:
    if "tensor" in name:
        pytest.importorskip("torch")
    monkeypatch.chdir(place.parent)
    edit(place, WORDS[name])
    require_refused(place)
    assert not os.path.exists("ran")


TEXTS = {
    "nothing": "",
    "no JSON": "\x80\x04\x95",
    "nested lists": "[" * 200_000,
    "nested dicts": '{"checkpoint":' * 200_000,
    "a number without end": '{"checkpoint": {"format": ' + "9" * 100_000 + "}}",
    "not a number": '{"checkpoint": {"format": NaN}, "crc32": "00000000"}',
    "halves": '{"checkpoint": "\\ud800", "crc32": "00000000"}',
    "null": "null",
    "a list": "[1]",
}


@pytest.mark.parametrize("name", TEXTS)
def test_a_text_that_is_none_is_refused_in_words(place, name) -> None:
    (place / "checkpoint.json").write_text(TEXTS[name], encoding="latin-1")
    require_refused(place)


@pytest.mark.parametrize("depth", [900, 5000])
def test_words_nested_too_deep_are_refused_in_words(place, depth) -> None:
    nested = '{"$tuple": [' * depth + "1" + "]}" * depth
    edit(place, put(*HOOK, value="deep"), ('"deep"', nested))
    require_refused(place)


class Bomb:
    """Unpickled, it leaves a file behind."""

    def __init__(self, path: pathlib.Path) -> None:
        self._path = str(path)

    def __reduce__(self) -> Any:
        return os.mkdir, (self._path,)


def test_no_pickle_is_loaded_wherever_it_stands(place, tmp_path) -> None:
    pickled = pickle.dumps(Bomb(tmp_path / "ran"))
    files = sorted(path for path in place.rglob("*") if path.is_file())
    for path in files:
        before = path.read_bytes()
        path.write_bytes(pickled)
        with contextlib.suppress(*ERRORS):
            np.testing.assert_equal(ft.load(place, LIKE)["x"], LIKE["x"])
        path.write_bytes(before)
    for name in ("state.pkl", "data.pickle", "__init__.py", "sitecustomize.py", "x.npy"):
        for folder in (place, place / "arrays", place / "arrays" / "state"):
            (folder / name).write_bytes(pickled)
    assert ft.load(place, LIKE)["x"].shape == (3, 4)
    np.save(
        place / "arrays" / "y.npy", np.array([Bomb(tmp_path / "ran")], object), allow_pickle=True
    )
    ft.Checkpointer(place.parent).verify()
    assert not (tmp_path / "ran").exists()
    pickle.loads(pickled)
    assert (tmp_path / "ran").exists()  # it would have been


def test_names_of_classes_in_orbax_s_own_words_are_not_imported(place, monkeypatch) -> None:
    (place.parent / "harmful_module.py").write_text("raise SystemExit('imported')")
    monkeypatch.syspath_prepend(str(place.parent))
    for name in ("_CHECKPOINT_METADATA", "state/_METADATA", "_METADATA"):
        path = place / "arrays" / name
        if not path.exists():
            continue
        before = path.read_text()
        for old, new in (("orbax.checkpoint", "harmful_module"), ("jax.Array", "harmful_module.X")):
            path.write_text(before.replace(old, new))
            with contextlib.suppress(*ERRORS):
                ft.load(place, LIKE)
        path.write_text(before)
    assert "harmful_module" not in sys.modules


@pytest.mark.parametrize("kind", ["link", "folder", "pipe"])
@pytest.mark.parametrize("where", ["checkpoint.json", "arrays", "arrays/state/manifest.ocdbt"])
def test_what_is_no_plain_file_is_refused_and_not_waited_for(place, tmp_path, where, kind) -> None:
    path = place / where
    path.rename(tmp_path / "moved")
    if kind == "link":
        path.symlink_to(tmp_path / "moved")
    elif kind == "folder":
        path.mkdir()
    else:
        os.mkfifo(path)
    require_refused(place)


def test_arrays_larger_than_they_are_said_to_be_are_refused(place) -> None:
    """The index is Orbax's: it may claim what it likes."""
    from orbax.checkpoint import v1 as ocp

    shutil.rmtree(place / "arrays")
    named = {"state/x": np.zeros((300, 400)), "state/y": np.zeros(5, np.float32)}
    ocp.save(place / "arrays", named | {"documents/hook/x": np.zeros(3)})
    require_refused(place)


def test_a_newer_format_says_which_version_reads_it(place) -> None:
    edit(place, lambda body: body | {"format": 2, "run": {"functrain": "9.1"}, "leaves": "new"})
    with pytest.raises(
        ft.CheckpointMismatchError,
        match=r"format 1 at most, got one of format 2, written by functrain 9\.1\. Load it with",
    ):
        ft.load(place, LIKE)
    checkpoints = ft.Checkpointer(place.parent, best="loss")
    with pytest.raises(ft.CheckpointMismatchError, match="functrain 9"):
        checkpoints.restore(LIKE)
    assert checkpoints.best() is None
    assert checkpoints.steps() == [1]


def add_zeros(place: pathlib.Path, count: int) -> None:
    """Adds a gigabyte of zeros to the arrays of a document, as Orbax compresses them."""
    from orbax.checkpoint import v1 as ocp

    shutil.rmtree(place / "arrays")
    arrays = {"state/x": LIKE["x"], "state/y": np.asarray(LIKE["y"])}
    ocp.save(place / "arrays", arrays | {"documents/hook/x": np.zeros(count, np.uint8)})


def test_documents_of_a_few_bytes_take_no_gigabyte_of_memory(place) -> None:
    with ft.Checkpointer(place.parent) as checkpoints:
        checkpoints.save(LIKE, 2)
    size = 200 * 2**20
    add_zeros(place, size)
    zeros = {"spec": f"uint8[{size}]", "crc32": f"{zlib.crc32(bytes(size)):08x}"}
    edit(place, put("leaves", "documents/hook/x", value=zeros))
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(
        ft.CheckpointCorruptError, match=r"documents of .* at the most .* said to be of 200"
    ):
        checkpoints.restore(LIKE, 1)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - peak < 50 * 2**10
    assert checkpoints.restore(LIKE).position.step == 2


def test_documents_as_large_as_the_state_are_restored_however_they_compress(tmp_path) -> None:
    state = {"x": np.zeros(40 * 2**20, np.uint8)}
    with ft.Checkpointer(tmp_path) as checkpoints:
        checkpoints.save(state, 1, documents={"best": state, "last": state})
    assert checkpoints.restore(state).documents["best"]["x"].nbytes == 40 * 2**20


def test_arrays_that_are_not_listed_are_refused_before_any_is_read(place, monkeypatch) -> None:
    from orbax.checkpoint import v1 as ocp

    shutil.rmtree(place / "arrays")
    arrays = {"state/x": LIKE["x"], "state/y": np.asarray(LIKE["y"])}
    more = {f"state/more{i}": np.zeros(1) for i in range(300)}
    ocp.save(place / "arrays", arrays | more | {"documents/hook/x": np.ones(3)})
    monkeypatch.setattr(_arrays.Stored, "read", None)
    wrong = ft.Checkpointer(place.parent).verify()[1]
    assert "more0: stored, but not listed" in wrong
    assert "288 more" in wrong
    with pytest.raises(ft.CheckpointCorruptError, match="stored, but not listed"):
        ft.load(place, LIKE)


def test_a_chunk_larger_than_its_array_is_refused_before_memory_is_taken(place) -> None:
    import tensorstore

    driver = {"driver": "file", "path": f"{place}/arrays/state/"}
    index = tensorstore.KvStore.open({"driver": "ocdbt", "base": driver}).result()
    text = index.read("state/x/zarr.json").result().value
    index.write("state/x/zarr.json", text.replace(b"[3,4]", b"[30000,40000]", 1)).result()
    with pytest.raises(ft.CheckpointCorruptError, match=r"x: .*chunk|x: .*in the file"):
        ft.load(place, LIKE)


def test_a_tensor_where_torch_is_missing_names_it_and_an_older_checkpoint_is_taken(
    place, monkeypatch
) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)
    with ft.Checkpointer(place.parent) as checkpoints:
        checkpoints.save(LIKE, 2, documents={"hook": {"x": np.ones(3)}})
    newer = place.parent / f"{2:012d}"
    edit(newer, put(*HOOK, value={"$tensor": {"$array": "documents/hook/x"}}))
    with pytest.raises(ft.CheckpointCorruptError, match=r"tensor float64\[3\].*pip install torch"):
        checkpoints.restore(LIKE, 2)
    with pytest.warns(UserWarning, match=r"Passed over, for step 1: .*pip install torch"):
        assert checkpoints.restore(LIKE).position.step == 1


def test_a_document_of_a_tensor_without_an_array_imports_nothing(place, monkeypatch) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)
    edit(place, put(*HOOK, value={"$tensor": "os.system"}))
    with pytest.raises(ft.CheckpointCorruptError, match="cannot be read"):
        ft.Checkpointer(place.parent).restore(LIKE, 1)
