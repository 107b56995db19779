"""Models at hf://, from a server that answers as the Hub does: `make test-adapters`."""

import hashlib
import http.server
import json
import pathlib
import threading
import urllib.parse

import fsspec
import numpy as np
import pytest

import functrain as ft
from functrain.checkpoint import _object_store

pytestmark = pytest.mark.adapters
pytest.importorskip("huggingface_hub")

RULES = [ft.Rename("h.*.weight", "h_*/kernel", "o i -> i o")]
STATE = {f"h_{i}": {"kernel": np.arange(6.0).reshape(3, 2) + i} for i in range(5)}


class Handler(http.server.BaseHTTPRequestHandler):
    root: pathlib.Path

    def do_GET(self) -> None:
        path = urllib.parse.urlparse(self.path).path
        _, in_tree, below = path.partition("/tree/main")
        _, resolved, name = path.partition("/resolve/main/")
        folder, file = self.root / below.lstrip("/"), self.root / name
        if in_tree and folder.is_dir():
            self.answer(json.dumps([self.entry(x) for x in folder.iterdir()]).encode())
        elif resolved and file.is_file():
            self.answer(file.read_bytes(), self.headers.get("Range"))
        elif path.removesuffix("/revision/main") == "/api/models/me/net":
            self.answer(json.dumps({"id": "me/net", "sha": "a" * 40, "siblings": []}).encode())
        else:
            known = "Entry" if in_tree or resolved else "Repo"
            self.answer(b"{}", status=404, code=f"{known}NotFound")

    def entry(self, file: pathlib.Path) -> dict[str, object]:
        oid, size = hashlib.sha1(file.read_bytes()).hexdigest(), file.stat().st_size
        return {"type": "file", "path": file.name, "size": size, "oid": oid}

    def answer(self, content: bytes, asked: str | None = None, status=200, code="") -> None:
        if asked:
            begin, end = map(int, asked.removeprefix("bytes=").split("-"))
            content, status = content[begin : end + 1], 206
        self.send_response(status)
        self.send_header("Content-Length", str(len(content)))
        if code:
            self.send_header("X-Error-Code", code)
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, *args: object) -> None:
        pass


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """The folder of hf://me/net."""
    handler = type("Handler", (Handler,), {"root": tmp_path})
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        url = f"http://127.0.0.1:{server.server_port}"
        monkeypatch.setitem(fsspec.config.conf, "hf", {"endpoint": url})
        _object_store._file_system.cache_clear()
        yield tmp_path
        _object_store._file_system.cache_clear()
        server.shutdown()


@pytest.mark.parametrize("place", ["me/net", "me/net@main"])
def test_a_model_on_the_hub_is_read(folder, place) -> None:
    path = folder / "model.safetensors"
    ft.export.params(path, STATE, rename=RULES, shard_bytes=96)
    (folder / "config.json").write_text("{}")
    like = {name: {"kernel": np.zeros((3, 2))} for name in STATE}
    for name in ("", "/model.safetensors.index.json"):
        warm = ft.warm_start(like, f"hf://{place}{name}", rename=RULES)
        assert warm.missing == warm.unused == ()
        for layer, leaf in STATE.items():
            np.testing.assert_array_equal(warm.state[layer]["kernel"], leaf["kernel"])
    (folder / "model-00002-of-00003.safetensors").unlink()
    _object_store._file_system.cache_clear()  # huggingface_hub keeps its listings
    with pytest.raises(ft.CheckpointCorruptError, match="00002-of-00003"):
        ft.warm_start(like, f"hf://{place}", rename=RULES)
    with pytest.raises(FileNotFoundError, match="nothing"):
        ft.warm_start(like, "hf://me/nothing", rename=RULES)
