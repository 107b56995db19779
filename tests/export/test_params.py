"""Arrays in safetensors files: read by the library that others use, and back."""

import json
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import safetensors.numpy

import functrain as ft
from tests import fork_server
from tests.checkpoint.test_disk import no_room
from tests.conftest import digest


def test_what_is_exported_is_what_the_library_reads(tmp_path) -> None:
    params = {"dense": {"kernel": jnp.arange(6.0).reshape(2, 3), "bias": jnp.ones(3, jnp.bfloat16)}}
    ft.export.params(tmp_path / "deep" / "p.safetensors", params)
    found = safetensors.numpy.load_file(tmp_path / "deep" / "p.safetensors")
    assert sorted(found) == ["dense/bias", "dense/kernel"]
    for name, array in found.items():
        np.testing.assert_array_equal(array, params["dense"][name.removeprefix("dense/")])
    assert found["dense/bias"].dtype == jnp.bfloat16


@pytest.mark.parametrize(
    "tree",
    [
        {"f8": jnp.arange(5.0).astype(jnp.float8_e4m3fn), "i": jnp.arange(3), "b": jnp.array(True)},
        {
            "host": np.arange(6.0).reshape(2, 3).T,
            "scalar": jnp.float32(3),
            "empty": jnp.ones((0, 2)),
        },
        [jnp.ones(2), (jnp.zeros(3), None)],
        jnp.arange(4.0),
    ],
    ids=["dtypes", "layouts", "lists", "leaf"],
)
def test_any_arrays_come_back_bit_for_bit(tmp_path, tree) -> None:
    ft.export.params(tmp_path / "p.safetensors", tree)
    like = jax.tree.map(jnp.zeros_like, tree)
    like = jax.tree.map(
        lambda x, z: np.zeros_like(x) if isinstance(x, np.ndarray) else z, tree, like
    )
    assert digest(ft.warm_start(like, tmp_path / "p.safetensors").state) == digest(tree)


def test_every_array_is_aligned_to_its_elements_in_the_file(tmp_path) -> None:
    dtypes = ["bool", "bfloat16", "int8", "float16", "uint64", "int16", "float32"]
    arrays = {f"{i}": np.arange(3).astype(jnp.dtype(name)) for i, name in enumerate(dtypes)}
    path = tmp_path / "p.safetensors"
    ft.export.params(path, arrays)
    text = path.read_bytes()
    length = int.from_bytes(text[:8], "little")
    header = json.loads(text[8 : 8 + length])
    assert header.pop("__metadata__") == {"format": "pt"}
    for name, record in header.items():
        assert (8 + length + record["data_offsets"][0]) % arrays[name].itemsize == 0
    found = safetensors.numpy.load_file(path)
    for name, array in arrays.items():
        np.testing.assert_array_equal(found[name].astype("f4"), array.astype("f4"))


def test_a_file_is_replaced_only_when_asked_and_never_by_half_a_one(tmp_path) -> None:
    path = tmp_path / "p.safetensors"
    ft.export.params(path, {"w": jnp.ones(2)})
    with pytest.raises(FileExistsError, match="overwrite=True"):
        ft.export.params(path, {"w": jnp.zeros(2)})
    with no_room(100), pytest.raises(OSError, match=r"too large: .*p\.safetensors"):
        ft.export.params(path, {"w": np.zeros(200)}, overwrite=True)
    assert [p.name for p in tmp_path.iterdir()] == ["p.safetensors"]
    assert safetensors.numpy.load_file(path)["w"][0] == 1
    ft.export.params(path, {"w": jnp.zeros(2)}, overwrite=True)
    assert safetensors.numpy.load_file(path)["w"][0] == 0


KILLED = """
import itertools, os, signal, sys
import numpy as np
import functrain as ft

def export(place, value, shard_bytes):
    arrays = {f"w{i}": np.full(4, value, np.float32) for i in range(6)}
    how = {"shard_bytes": int(shard_bytes) or None, "overwrite": True}
    ft.export.params(f"{place}/model.safetensors", arrays, **how)

def die_at(moment):
    left = iter(range(moment))
    for name in ("fsync", "remove", "replace"):
        def act(*args, method=getattr(os, name)):
            if next(left, None) is None:
                os.kill(os.getpid(), signal.SIGKILL)
            return method(*args)
        setattr(os, name, act)

for moment in itertools.count():
    child = os.fork()
    if not child:
        place = os.path.join(sys.argv[1], str(moment))
        export(place, 1, sys.argv[2])
        die_at(moment)
        export(place, 2, sys.argv[3])
        os._exit(0)
    if os.waitpid(child, 0)[1] != signal.SIGKILL:
        break
"""


@pytest.mark.parametrize("sizes", ["0 16", "16 0", "16 16", "16 32"])
def test_a_kill_at_any_moment_leaves_the_old_model_the_new_one_or_an_error(tmp_path, sizes) -> None:
    command = [sys.executable, "-c", KILLED, tmp_path, *sizes.split()]
    fork_server.run(command, check=True)
    found = []
    like = {f"w{i}": np.zeros(4, np.float32) for i in range(6)}
    for moment in range(len(list(tmp_path.iterdir()))):
        try:
            warm = ft.warm_start(like, tmp_path / str(moment))
        except (ft.CheckpointCorruptError, ft.CheckpointMismatchError):
            found.append("error")
        else:
            assert warm.missing == ()
            (value,) = {float(x) for leaf in warm.state.values() for x in leaf}
            found.append(value)
    # While files are written, the old model stays.
    assert (found[0], found[-1], len(found) > 4) == (1, 2, True)
    assert found == sorted(found, key=[1, "error", 2].index)


@pytest.mark.parametrize("fails", ["a leaf was donated", "the disk is full"])
def test_a_failed_export_leaves_the_old_files(tmp_path, fails) -> None:
    path, arrays = tmp_path / "model.safetensors", {"a": jnp.ones(40), "b": jnp.ones(40)}
    ft.export.params(path, arrays, shard_bytes=160)
    before = {file.name: file.read_bytes() for file in tmp_path.iterdir()}
    assert len(before) == 3
    donated = fails == "a leaf was donated"
    later = {"a": jnp.zeros(40), "b": jnp.zeros(40 if donated else 4000)}
    if donated:
        later["b"].delete()
    with no_room(4000), pytest.raises(ValueError if donated else OSError):
        ft.export.params(path, later, shard_bytes=160, overwrite=True)
    assert {file.name: file.read_bytes() for file in tmp_path.iterdir()} == before


@pytest.mark.parametrize("params", [{"w": jnp.ones(2, jnp.int4)}, {"w": jax.random.key(0)}])
def test_what_such_files_cannot_hold_is_refused(tmp_path, params) -> None:
    with pytest.raises(TypeError, match="w: expected an array of a dtype that safetensors has"):
        ft.export.params(tmp_path / "p.safetensors", params)
    with pytest.raises(ValueError, match="expected a pytree with arrays, got"):
        ft.export.params(tmp_path / "p.safetensors", {"a": {}})
    assert not list(tmp_path.iterdir())


def test_the_name_has_to_say_what_it_is(tmp_path) -> None:
    with pytest.raises(ValueError, match=r"ends in \.safetensors, got .*params\.bin"):
        ft.export.params(tmp_path / "params.bin", {"w": jnp.ones(2)})
    with pytest.raises(TypeError, match="The path comes first"):
        ft.export.params({"w": jnp.ones(2)}, tmp_path / "params.safetensors")
    (tmp_path / "a.safetensors").mkdir()
    with pytest.raises(FileExistsError, match="got a directory"):
        ft.export.params(tmp_path / "a.safetensors", {"w": jnp.ones(2)}, overwrite=True)
