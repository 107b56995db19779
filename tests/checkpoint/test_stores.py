"""Checkpoints in emulations of S3 and of Google's store, with kills: `make test-remote`."""

import importlib.util
import random
import socket
import subprocess
import sys
import time
from collections.abc import Iterator

import fsspec
import numpy as np
import pytest

import functrain as ft
from functrain.checkpoint._errors import ObjectStoreError
from tests.checkpoint import test_killed
from tests.several_processes import lines_starting, outputs, start

NEEDED = ("s3fs", "gcsfs", "moto", "gcp_storage_emulator")
pytestmark = [
    pytest.mark.remote,
    pytest.mark.skipif(
        not all(map(importlib.util.find_spec, NEEDED)), reason=f"needs {', '.join(NEEDED)}"
    ),
    pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::ResourceWarning"),
]

SERVERS = {
    "s3": ["-m", "moto.server", "-H", "127.0.0.1", "-p"],
    "gs": ["-m", "gcp_storage_emulator", "start", "--host", "127.0.0.1", "--in-memory", "--port"],
}


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


def wait_for(port: int) -> None:
    until = time.monotonic() + 60
    while True:
        try:
            return socket.create_connection(("127.0.0.1", port), 1).close()
        except OSError:
            assert time.monotonic() < until
            time.sleep(0.1)


@pytest.fixture(scope="module", params=list(SERVERS))
def bucket(request: pytest.FixtureRequest) -> Iterator[str]:
    """The address of a bucket in an emulation that runs as a process of its own."""
    port = free_port()
    environment = {
        "AWS_ENDPOINT_URL": f"http://127.0.0.1:{port}",
        "AWS_ACCESS_KEY_ID": "key",
        "AWS_SECRET_ACCESS_KEY": "secret",
        "AWS_DEFAULT_REGION": "us-east-1",
        "STORAGE_EMULATOR_HOST": f"http://127.0.0.1:{port}",
        # Of TensorStore, which reads Orbax checkpoints.
        "TENSORSTORE_GCS_HTTP_URL": f"http://127.0.0.1:{port}",
        "GOOGLE_AUTH_TOKEN_FOR_TESTING": "token",
        "GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT": "false",  # it asks for credentials
    }
    server = subprocess.Popen(
        [sys.executable, *SERVERS[request.param], str(port)],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    with pytest.MonkeyPatch.context() as patch:
        for name, value in environment.items():
            patch.setenv(name, value)
        try:
            wait_for(port)
            fsspec.filesystem(request.param, skip_instance_cache=True).mkdir("bucket")
            yield f"{request.param}://bucket"
        finally:
            server.kill()
            server.wait()


@pytest.fixture
def url(bucket: str, request: pytest.FixtureRequest) -> str:
    return f"{bucket}/{request.node.name}"


LIKE = {"x": np.zeros(3)}


def test_checkpoints_are_saved_replaced_restored_and_removed(url) -> None:
    with ft.Checkpointer(url, keep=2) as checkpoints:
        for version, step in enumerate((1, 2, 2, 3, 4)):
            checkpoints.save({"x": np.full(3, float(version))}, step)
        assert checkpoints.steps() == [3, 4]
        assert checkpoints.verify() == {}
        assert np.all(checkpoints.restore(LIKE).state["x"] == 4)
        checkpoints.rollback(3)
        assert checkpoints.steps() == [3]
        checkpoints.save(LIKE, 4)
        second = ft.Checkpointer(url)
        second.save(LIKE, 5)
        with pytest.raises(RuntimeError, match="has taken over"):
            checkpoints.save(LIKE, 6)
    ft.save(f"{url}/one", LIKE)
    with pytest.raises(FileExistsError):
        ft.save(f"{url}/one", LIKE)
    ft.save(f"{url}/one", {"x": np.ones(3)}, overwrite=True)
    assert np.all(ft.load(f"{url}/one", LIKE)["x"] == 1)


def test_an_upload_in_several_parts_comes_back_bit_for_bit(url) -> None:
    state = {"x": np.random.default_rng(0).standard_normal(9_500_000), "y": np.arange(5)}  # 72 MiB
    ft.save(url, state)
    loaded = ft.load(url, state)
    assert loaded["x"].tobytes() == state["x"].tobytes()
    assert np.array_equal(loaded["y"], state["y"])


def test_a_bucket_that_is_missing_is_named(bucket) -> None:
    other = bucket.replace("bucket", "another-bucket")
    with pytest.raises((FileNotFoundError, ObjectStoreError), match="another-bucket"):
        ft.Checkpointer(f"{other}/run").save(LIKE, 1)


def test_weights_of_other_programs_are_read(url, tmp_path) -> None:
    arrays = {f"h.{i}.weight": np.arange(6.0).reshape(2, 3) + i for i in range(5)}
    like = {f"h_{i}": {"kernel": np.zeros((3, 2))} for i in range(5)}
    rules = [ft.Rename("h.*.weight", "h_*/kernel", "o i -> i o")]
    state = {f"h_{i}": {"kernel": arrays[f"h.{i}.weight"].T} for i in range(5)}
    out = tmp_path / "model" / "model.safetensors"
    ft.export.params(out, state, rename=rules, shard_bytes=96)
    np.savez(tmp_path / "weights.npz", **arrays)
    store = fsspec.filesystem(url.partition("://")[0], skip_instance_cache=True)
    for file in (*out.parent.iterdir(), tmp_path / "weights.npz"):
        store.put_file(str(file), f"{url}/{file.relative_to(tmp_path)}")
    sources = ("model", "model/model.safetensors.index.json", "weights.npz")
    for warm in [ft.warm_start(like, f"{url}/{x}", rename=rules) for x in sources]:
        assert warm.missing == warm.unused == ()
        for name, leaf in state.items():
            assert np.array_equal(warm.state[name]["kernel"], leaf["kernel"])
    store.rm_file(f"{url}/model/model-00002-of-00003.safetensors")
    with pytest.raises(ft.CheckpointCorruptError, match=r"00002-of-00003\.safetensors: missing"):
        ft.warm_start(like, f"{url}/model", rename=rules)
    with pytest.raises(FileNotFoundError, match="nowhere"):
        ft.warm_start(like, f"{url}/nowhere.safetensors", rename=rules)


@pytest.mark.parametrize("ocdbt", [True, False])
def test_orbax_checkpoints_are_read(url, tmp_path, ocdbt) -> None:
    ocp = pytest.importorskip("orbax.checkpoint")
    if ocdbt and url.startswith("gs://"):
        pytest.skip("the emulation sends no generations of objects, which TensorStore compares")
    tree = {"a b": np.arange(6.0).reshape(2, 3), "c": {"d": np.ones(2, np.float32)}}
    with ocp.PyTreeCheckpointer(use_ocdbt=ocdbt) as checkpointer:
        checkpointer.save(tmp_path / "run" / "7" / "default", tree)
    store = fsspec.filesystem(url.partition("://")[0], skip_instance_cache=True)
    for file in tmp_path.rglob("*"):
        if file.is_file():
            store.put_file(str(file), f"{url}/{file.relative_to(tmp_path)}")
    like = {"a b": np.zeros((2, 3)), "c": {"d": np.zeros(2, np.float32)}}
    warm = ft.warm_start(like, f"{url}/run")
    assert np.array_equal(warm.state["a b"], tree["a b"])
    assert np.array_equal(warm.state["c"]["d"], tree["c"]["d"])


MULTIPROCESS = """
import sys, jax, jax.numpy as jnp, numpy as np, functrain as ft
ft.distributed.initialize()
mesh = ft.sharding.mesh({"data": jax.device_count()})
rows = jax.NamedSharding(mesh, jax.P("data"))
make = lambda step: jax.jit(lambda: {"x": jnp.arange(64.0) + step}, out_shardings=rows)()
with ft.Checkpointer(sys.argv[1], keep=2) as checkpoints:
    for step in (1, 2, 2, 3):
        checkpoints.save(make(step), step)
    restored = checkpoints.restore(make(0))
    same = all(np.array_equal(s.data, np.arange(64.0)[s.index] + 3)
               for s in restored.state["x"].addressable_shards)
    print("same", same, checkpoints.steps(), checkpoints.verify())
"""


@pytest.mark.long
def test_two_processes_save_and_restore_together(bucket) -> None:
    url = f"{bucket}/two"
    program = ["-c", MULTIPROCESS]
    printed = outputs(start(2, program, url, popen=subprocess.Popen))
    assert lines_starting(printed, "same") == ["same True [2, 3] {}"] * 2
    loaded = ft.load(f"{url}/{3:012d}", {"x": np.zeros(64, np.float32)})
    assert np.array_equal(loaded["x"], np.arange(64) + 3)


@pytest.mark.parametrize(("seed", "kills"), [(0, 5), pytest.param(1, 100, marks=pytest.mark.long)])
def test_every_checkpoint_is_whole_whenever_its_process_is_killed(bucket, seed, kills) -> None:
    chance, url = random.Random(seed), f"{bucket}/killed-{seed}"
    lives = test_killed.Lives()
    try:
        for _ in range(kills):
            saved = lives.kill_one(url, lambda _: time.sleep(chance.uniform(0, 1)))
            test_killed.require_whole(url, saved)
    finally:
        lives.close()
    # The next writer deletes what no manifest names.
    with ft.Checkpointer(url, keep=1) as checkpoints:
        checkpoints.save(LIKE, checkpoints.latest() + 1)
        steps = len(checkpoints.steps())
    store = fsspec.filesystem(bucket[:2], use_listings_cache=False, skip_instance_cache=True)
    assert len(store.find(url)) == 1 + 2 * steps  # the record of the writer, and pairs
