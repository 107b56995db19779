"""Arrays out of files that others wrote: what is read, and what is refused in words."""

import os
import pickle
import warnings
import zipfile

import h5py
import jax.numpy as jnp
import keras
import ml_dtypes
import numpy as np
import pytest
import safetensors.numpy

import functrain as ft
from functrain.checkpoint._sources import open_arrays


def write_safetensors(path, arrays):
    safetensors.numpy.save_file(arrays, path)
    return path


def small(dtype=np.float32):
    return {"dense/kernel": np.arange(6).reshape(3, 2).astype(dtype), "dense/bias": np.ones(2)}


OF_NUMPY = ["bool", "int8", "int64", "uint16", "float16", "float64", "complex64"]
OTHERS = ["bfloat16", "float8_e4m3fn", "float8_e5m2", "float8_e8m0fnu"]


@pytest.mark.parametrize("dtype", OF_NUMPY + OTHERS)
def test_safetensors_of_every_dtype_come_as_they_were_written(tmp_path, dtype) -> None:
    array = np.arange(6).reshape(3, 2).astype(getattr(ml_dtypes, dtype, None) or dtype)
    path = write_safetensors(tmp_path / "a.safetensors", {"x": array, "none": np.zeros((0, 4))})
    warm = ft.warm_start({"x": np.zeros_like(array), "none": np.ones((0, 4))}, path)
    assert warm.state["x"].dtype == array.dtype
    assert warm.state["x"].tobytes() == array.tobytes()
    assert warm.state["none"].shape == (0, 4)


@pytest.mark.parametrize("share", [0, 1, 7, 8, 40, -1, -30])
def test_a_safetensors_file_that_is_cut_short_is_called_damaged(tmp_path, share) -> None:
    path = write_safetensors(tmp_path / "a.safetensors", small())
    path.write_bytes(path.read_bytes()[:share])
    with pytest.raises(ft.CheckpointCorruptError, match=r"a\.safetensors: expected an intact"):
        ft.warm_start({"dense": {"bias": np.zeros(2)}}, path)


class Runs:
    """Says so when it is unpickled."""

    def __reduce__(self):
        return os.mkdir, ("it-ran",)


@pytest.mark.parametrize("suffix", [".safetensors", ".h5", ".keras", ".weights.h5"])
@pytest.mark.parametrize("protocol", [0, 2, 5])
def test_a_pickle_is_never_opened_under_any_name(tmp_path, monkeypatch, suffix, protocol) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / f"a{suffix}").write_bytes(pickle.dumps(Runs(), protocol))
    with pytest.raises(ft.CheckpointCorruptError, match="not of the format in its name"):
        ft.warm_start({"x": jnp.ones(2)}, f"a{suffix}")
    assert not os.path.exists("it-ran")


@pytest.mark.parametrize(
    ("name", "error", "message"),
    [
        ("nothing", FileNotFoundError, r"got nothing\. Check the path\.$"),
        ("nothing.safetensors", FileNotFoundError, r"got nothing\. Check the path\.$"),
        ("folder", ft.CheckpointMismatchError, "got something else"),
        ("text.txt", ft.CheckpointMismatchError, r"or a file named \.safetensors\.index"),
        ("text", ft.CheckpointMismatchError, r"or a file named \.safetensors\.index"),
        ("text.safetensors", ft.CheckpointCorruptError, "intact .safetensors file"),
        ("text.h5", ft.CheckpointCorruptError, "intact .h5 file"),
        ("text.keras", ft.CheckpointCorruptError, "intact .keras file"),
        ("empty.keras", ft.CheckpointCorruptError, r"as Keras 3 saves it.*model\.weights\.h5"),
    ],
)
def test_what_is_no_such_file_is_called_by_its_name(tmp_path, name, error, message) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "other").touch()
    for each in ("text.txt", "text", "text.safetensors", "text.h5", "text.keras"):
        (tmp_path / each).write_text("some text of the length that a header has")
    with zipfile.ZipFile(tmp_path / "empty.keras", "w") as archive:
        archive.writestr("config.json", "{}")
    with pytest.raises(error, match=message):
        ft.warm_start({"x": jnp.ones(2)}, tmp_path / name)


def build(width=3):
    return keras.Sequential([keras.Input((2,)), keras.layers.Dense(width)])


@pytest.mark.parametrize("suffix", [".keras", ".weights.h5"])
def test_files_of_keras_are_read_under_the_names_they_have(tmp_path, suffix) -> None:
    model = build()
    path = tmp_path / f"model{suffix}"
    (model.save if suffix == ".keras" else model.save_weights)(path)
    state = {"layers": {"dense": {"vars": [jnp.zeros((2, 3)), jnp.ones(3)]}}}
    warm = ft.warm_start(state, path)
    np.testing.assert_array_equal(warm.state["layers"]["dense"]["vars"][0], model.get_weights()[0])
    with pytest.raises(
        ft.CheckpointMismatchError, match=r"expected float32\[2, 9\], got float32\[2, 3\]"
    ):
        ft.warm_start({"layers": {"dense": {"vars": [jnp.zeros((2, 9))]}}}, path)


def test_bfloat16_of_keras_comes_as_bfloat16(tmp_path) -> None:
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(3, dtype="bfloat16")])
    model.save_weights(tmp_path / "b.weights.h5")
    state = {"layers": {"dense": {"vars": [jnp.zeros((2, 3), jnp.bfloat16)]}}}
    found = ft.warm_start(state, tmp_path / "b.weights.h5").state["layers"]["dense"]["vars"][0]
    np.testing.assert_array_equal(found, model.weights[0].value)


def test_a_flipped_bit_in_the_weights_of_an_archive_is_found(tmp_path) -> None:
    path = tmp_path / "model.keras"
    build().save(path)
    whole = path.read_bytes()
    with zipfile.ZipFile(path) as archive:
        start = archive.getinfo("model.weights.h5").header_offset + 200
    for at in range(start, start + 8000, 997):
        path.write_bytes(whole[:at] + bytes([whole[at] ^ 16]) + whole[at + 1 :])
        with pytest.raises(ft.CheckpointCorruptError, match=r"model\.keras: .*CRC"):
            ft.warm_start({"layers": {"dense": {"vars": [jnp.zeros((2, 3))]}}}, path)


def test_hdf5_links_and_datasets_that_lead_out_of_the_file_are_not_followed(tmp_path) -> None:
    (tmp_path / "secret").write_bytes(bytes(range(64)))
    with h5py.File(tmp_path / "other.h5", "w") as file:
        file["x"] = np.ones(2, np.float32)
    with h5py.File(tmp_path / "link.h5", "w") as file:
        file["x"] = h5py.ExternalLink("other.h5", "x")
        file["y"] = np.ones(2, np.float32)
    with open_arrays(str(tmp_path / "link.h5")) as arrays:
        assert list(arrays.specs) == ["y"]
    with h5py.File(tmp_path / "raw.h5", "w") as file:
        file.create_dataset("x", (8,), "f4", external=[(str(tmp_path / "secret"), 0, 32)])
    with h5py.File(tmp_path / "virtual.h5", "w") as file:
        layout = h5py.VirtualLayout((2,), "f4")
        layout[:] = h5py.VirtualSource(tmp_path / "other.h5", "x", shape=(2,))
        file.create_virtual_dataset("x", layout)
    for name in ("raw.h5", "virtual.h5"):
        with pytest.raises(
            ft.CheckpointMismatchError, match="expected arrays within the file, got x"
        ):
            ft.warm_start({"x": np.zeros(8, np.float32)}, tmp_path / name)


@pytest.mark.parametrize("name", ["kernel", "weight"])
@pytest.mark.parametrize("shape", [(3, 3), (3, 2), (3,)])
def test_square_matrices_of_torch_warn_where_kernels_are_transposed(tmp_path, name, shape) -> None:
    array = np.arange(np.prod(shape), dtype=np.float32).reshape(shape)
    path = write_safetensors(tmp_path / "torch.safetensors", {"body.0.weight": array})
    state = {"dense": {name: jnp.zeros(shape)}}
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        warm = ft.warm_start(state, path, rename=lambda _: f"dense/{name}")
    is_ambiguous = name == "kernel" and shape == (3, 3)
    assert ["[inputs, outputs]" in str(each.message) for each in caught] == [True] * is_ambiguous
    np.testing.assert_array_equal(warm.state["dense"][name], array)
