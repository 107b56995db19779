"""Models in several safetensors files with an index, on disks and at URLs."""

import functools
import http.server
import io
import json
import os
import pathlib
import shutil
import threading

import fsspec
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
import safetensors.numpy

import functrain as ft
from functrain.checkpoint._errors import ObjectStoreError
from functrain.checkpoint._safetensors import open_safetensors

ARRAYS = {
    "a.weight": np.arange(12, dtype=np.float32).reshape(4, 3),
    "b.weight": np.arange(6).astype(ml_dtypes.bfloat16).reshape(2, 3),
    "c.bias": np.ones(5, np.int8),
    "scalar": np.float32(7)[None].reshape(()),
}
STATE = {
    "a": {"weight": jnp.zeros((4, 3))},
    "b": {"weight": jnp.zeros((2, 3), jnp.bfloat16)},
    "c": {"bias": np.zeros(5, np.int8)},
    "scalar": jnp.zeros(()),
}
RULES = [ft.Rename("*.*", "*/*"), ft.Rename("scalar", "scalar")]
FIRST, SECOND = (f"model-{i:05d}-of-00002.safetensors" for i in (1, 2))
PLACES = {"a.weight": FIRST, "b.weight": SECOND, "c.bias": SECOND, "scalar": FIRST}


def write(folder: pathlib.Path, places=PLACES, weight_map=None):
    """Writes shards by the library, and an index of the form that Hugging Face describes."""
    folder.mkdir(exist_ok=True)
    for shard in set(places.values()):
        arrays = {name: ARRAYS[name] for name, where in places.items() if where == shard}
        safetensors.numpy.save_file(arrays, folder / shard, {"format": "pt"})
    index = {"metadata": {"total_size": 100}, "weight_map": weight_map or places}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return folder


def check(source) -> None:
    warm = ft.warm_start(STATE, source, rename=RULES)
    found = dict(zip(sorted(ARRAYS), jax.tree.leaves(warm.state), strict=True))
    for name, array in ARRAYS.items():
        assert np.asarray(found[name]).tobytes() == array.tobytes()
    assert warm.unused == warm.missing == ()


def test_a_directory_or_its_index_is_read(tmp_path) -> None:
    check(write(tmp_path / "model"))
    check(tmp_path / "model" / "model.safetensors.index.json")
    (tmp_path / "model" / "config.json").write_text("{}")
    check(tmp_path / "model")


def test_a_directory_with_one_file_is_read(tmp_path) -> None:
    safetensors.numpy.save_file(ARRAYS, tmp_path / "model.safetensors")
    check(tmp_path)
    (tmp_path / "adapter_model.safetensors").touch()
    with pytest.raises(ft.CheckpointMismatchError, match=r"expected one model, got \['adapter_"):
        check(tmp_path)


def test_one_of_several_files_is_not_taken_for_a_model(tmp_path) -> None:
    write(tmp_path / "model")
    (tmp_path / "model" / "model.safetensors.index.json").unlink()
    (tmp_path / "model" / SECOND).unlink()
    with pytest.raises(ft.CheckpointCorruptError, match=r"an index of its files.*00001-of-00002"):
        check(tmp_path / "model")


def test_links_to_files_of_other_names_are_read(tmp_path) -> None:
    # As the cache of huggingface_hub has them.
    folder = write(tmp_path / "blobs")
    snapshot = tmp_path / "snapshot"
    snapshot.mkdir()
    for number, file in enumerate(sorted(folder.iterdir())):
        blob = file.rename(folder / f"{number}")
        (snapshot / file.name).symlink_to(blob)
    check(snapshot)
    check(snapshot / "model.safetensors.index.json")
    warm = ft.warm_start(STATE, snapshot / FIRST, rename=RULES)
    assert sorted(warm.loaded) == ["a/weight", "scalar"]


def test_files_are_closed_after_an_error(tmp_path) -> None:
    folder = write(tmp_path / "model")
    opened = set(os.listdir("/proc/self/fd"))
    with pytest.raises(ft.CheckpointMismatchError):
        ft.warm_start({"a": {"weight": jnp.zeros(3)}}, folder, rename=RULES)
    assert set(os.listdir("/proc/self/fd")) == opened


def test_models_are_read_at_urls(tmp_path) -> None:
    write(tmp_path / "model")
    store = fsspec.filesystem("memory")
    store.put(str(tmp_path / "model"), "/weights", recursive=True)
    check("memory://weights")
    check("memory://weights/model.safetensors.index.json")
    np.savez(tmp_path / "a.npz", **ARRAYS | {"b.weight": np.zeros(2)})
    store.put(str(tmp_path / "a.npz"), "/a.npz")
    rules = [ft.Rename("a.weight", "a/weight")]
    warm = ft.warm_start(STATE, "memory://a.npz", rename=rules)
    np.testing.assert_array_equal(warm.state["a"]["weight"], ARRAYS["a.weight"])
    with pytest.raises(FileNotFoundError, match="memory://nowhere"):
        check("memory://nowhere")


def test_damage_and_a_store_that_fails_are_told_apart(tmp_path, monkeypatch) -> None:
    safetensors.numpy.save_file(ARRAYS, tmp_path / "a.safetensors")
    content = (tmp_path / "a.safetensors").read_bytes()
    store = fsspec.filesystem("memory")
    store.pipe_file("/short.safetensors", content[:-1])
    with pytest.raises(ft.CheckpointCorruptError, match=r"got \d+\. It is damaged"):
        check("memory://short.safetensors")
    store.pipe_file("/whole.safetensors", content)

    class Failing(io.BytesIO):
        def readinto(self, view):
            raise OSError("connection reset")

    monkeypatch.setattr(type(store), "open", lambda *_, **__: Failing(content))
    with pytest.raises(ObjectStoreError, match="connection reset"):
        check("memory://whole.safetensors")


def test_a_protocol_that_fsspec_does_not_know_is_refused() -> None:
    with pytest.raises(ValueError, match="xyz://: expected a protocol that fsspec knows"):
        check("xyz://weights")
    with pytest.raises(ValueError, match="a URL of gs:// or s3://"):
        ft.save("http://host/weights", STATE)


def test_a_part_of_an_array_without_elements_is_read(tmp_path) -> None:
    safetensors.numpy.save_file({"x": np.zeros((4, 0, 3))}, tmp_path / "a.safetensors")
    with open_safetensors(str(tmp_path / "a.safetensors")) as arrays:
        assert arrays.read("x", (slice(1, 4), slice(0, 0), slice(0, 1))).shape == (3, 0, 1)


class Server:
    """A server that answers ranges, as those of models do."""

    def __init__(self, folder: pathlib.Path) -> None:
        self.ranges: list[str] = []
        outer = self

        class Handler(http.server.BaseHTTPRequestHandler):
            def do_HEAD(self) -> None:
                self.answer(with_body=False)

            def do_GET(self) -> None:
                self.answer(with_body=True)

            def answer(self, *, with_body: bool) -> None:
                path = folder / self.path.lstrip("/")
                if not path.is_file():
                    return self.send_error(404)
                content, begin = path.read_bytes(), 0
                total = len(content)
                if asked := self.headers.get("Range"):
                    outer.ranges.append(asked)
                    begin, end = map(int, asked.removeprefix("bytes=").split("-"))
                    content = content[begin : end + 1]
                self.send_response(206 if asked else 200)
                self.send_header("Accept-Ranges", "bytes")
                self.send_header("Content-Length", str(len(content)))
                if asked:
                    end = begin + len(content) - 1
                    self.send_header("Content-Range", f"bytes {begin}-{end}/{total}")
                self.end_headers()
                if with_body:
                    self.wfile.write(content)
                return None

            def log_message(self, *args: object) -> None:
                pass

        self.server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        threading.Thread(target=self.server.serve_forever, daemon=True).start()
        self.url = f"http://127.0.0.1:{self.server.server_port}"


@pytest.mark.remote
def test_a_file_on_a_web_server_is_read(tmp_path) -> None:
    pytest.importorskip("aiohttp")
    safetensors.numpy.save_file(ARRAYS, tmp_path / "model.safetensors")
    check(f"{Server(tmp_path).url}/model.safetensors")


def missing_shard(folder: pathlib.Path) -> None:
    (folder / SECOND).unlink()


def surplus_shard(folder: pathlib.Path) -> None:
    shutil.copy(folder / SECOND, folder / "model-00003-of-00003.safetensors")


def damaged_shard(folder: pathlib.Path) -> None:
    (folder / SECOND).write_bytes((folder / SECOND).read_bytes()[:-1])


def index_of(weight_map):
    return functools.partial(write, weight_map=weight_map)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (missing_shard, r"model-00002-of-00002\.safetensors: missing"),
        (surplus_shard, r"model-00003-of-00003\.safetensors: not in the index"),
        (damaged_shard, r"model-00002-of-00002\.safetensors: expected an intact"),
        (index_of(PLACES | {"b.weight": FIRST}), r"b\.weight: not in model-00001-of"),
        (index_of(PLACES | {"b.weight": FIRST}), r"b\.weight: in model-00002.*but in the index in"),
        (
            index_of({"a.weight": FIRST, "c.bias": SECOND}),
            r"b\.weight: in .*, but not in the index",
        ),
        (index_of(PLACES | {"more": FIRST}), r"more: not in model-00001"),
        (index_of({"a.weight": "../a.safetensors"}), "is not a name of a file beside it"),
        (index_of(["a.weight"]), "expected an intact index"),
        (index_of({"a.weight": 3}), "expected an intact index"),
    ],
)
def test_shards_that_are_not_those_of_the_index_are_named(tmp_path, damage, message) -> None:
    folder = write(tmp_path / "model")
    damage(folder)
    with pytest.raises(ft.CheckpointCorruptError, match=message):
        check(folder)


def test_an_array_in_two_shards_is_named(tmp_path) -> None:
    folder = write(tmp_path / "model")
    arrays = {name: ARRAYS[name] for name in ("b.weight", "a.weight", "c.bias")}
    safetensors.numpy.save_file(arrays, folder / SECOND)
    with pytest.raises(ft.CheckpointCorruptError, match=r"a\.weight: in model-00002.*00001-of"):
        check(folder)


def header(**entries):
    text = json.dumps(entries).encode()
    return len(text).to_bytes(8, "little") + text


X = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}


@pytest.mark.parametrize(
    "content",
    [
        header(x=X) + bytes(7),
        header(x=X) + bytes(9),
        header(x=X | {"shape": [3]}) + bytes(8),
        header(x=X | {"shape": [-1, -2]}) + bytes(8),
        header(x=X | {"data_offsets": [8, 16]}) + bytes(16),
        header(x=X, y=X) + bytes(8),
        header(x=X, y=X | {"data_offsets": [4, 12]}) + bytes(12),
        header(x=X | {"shape": 2}) + bytes(8),
        header(x=[]) + bytes(8),
        (2**63).to_bytes(8, "little") + bytes(8),
        b"\x08" + bytes(7) + b"[[[[[[[[",
    ],
)
def test_headers_that_contradict_themselves_or_the_file_are_damage(tmp_path, content) -> None:
    (tmp_path / "a.safetensors").write_bytes(content)
    with pytest.raises(ft.CheckpointCorruptError, match=r"expected an intact \.safetensors file"):
        ft.warm_start({"x": np.zeros(2, np.float32)}, tmp_path / "a.safetensors")
