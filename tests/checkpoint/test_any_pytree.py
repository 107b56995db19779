"""Whatever is in a state comes back as it was: each dtype, each key, each path, each optimizer."""

from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import optax
import pytest

import functrain as ft
from tests.conftest import digest

OF_ML_DTYPES = [
    np.dtype(kind)
    for kind in vars(ml_dtypes).values()
    if isinstance(kind, type) and issubclass(kind, np.generic)
]
NOT_OF_JAX = ("bcomplex32", "complex32", "float6_e2m3fn", "float6_e3m2fn", "int1", "uint1")
OF_NUMPY = [np.dtype(name) for name in ("?", "i1", "u8", "f2", "f8", "g", "c8", "G", ">f4", ">i2")]


def there_and_back(tmp_path: Any, tree: Any) -> Any:
    ft.save(tmp_path / "c", tree)
    got = ft.load(tmp_path / "c", like=tree)
    assert jax.tree.structure(got) == jax.tree.structure(tree)
    assert digest(got) == digest(tree)
    assert list(map(type, jax.tree.leaves(got))) == list(map(type, jax.tree.leaves(tree)))
    return got


def every_value(dtype: np.dtype) -> np.ndarray:
    """All values of a small dtype that it knows, NaN among them; some of a large one."""
    numbers = np.arange(256, dtype=np.uint8)
    if dtype.itemsize > 1:
        return np.tile(numbers, dtype.itemsize).astype(dtype)
    with np.errstate(all="ignore"):
        return np.array([number.astype(dtype) for number in numbers.view(np.int8)])


@pytest.mark.parametrize("dtype", [*OF_ML_DTYPES, *OF_NUMPY], ids=str)
def test_every_dtype_comes_back_to_the_bit(tmp_path, dtype) -> None:
    values = every_value(dtype)
    tree = {"flat": values, "folded": values.reshape(4, -1), "one": values[7:8].reshape(())}
    assert there_and_back(tmp_path, tree)["flat"].dtype.str == dtype.str


@pytest.mark.parametrize("dtype", [d for d in OF_ML_DTYPES if d.name not in NOT_OF_JAX], ids=str)
def test_every_dtype_of_jax_comes_back_as_an_array_of_jax(tmp_path, dtype) -> None:
    array = jnp.asarray(every_value(dtype))
    got = there_and_back(tmp_path, {"x": array, "y": array.reshape(2, -1)})
    assert got["x"].dtype == dtype


def test_a_state_before_its_path_is_told_the_order(tmp_path) -> None:
    with pytest.raises(TypeError, match=r"path: expected a path.*got 3 in 1 array.*save\(path, st"):
        ft.save({"w": np.ones(3)}, tmp_path / "saved")


def test_a_nan_keeps_what_it_carries(tmp_path) -> None:
    words = np.array([0x7FC01234, 0xFFC00001, 0x7F800001, 0x80000000], np.uint32)
    tree = {"numpy": words.view(np.float32), "jax": jnp.asarray(words).view(jnp.float32)}
    there_and_back(tmp_path, tree)


@pytest.mark.parametrize("impl", ["threefry2x32", "rbg", "unsafe_rbg"])
def test_keys_of_every_kind_come_back(tmp_path, impl) -> None:
    key = jax.random.key(7, impl=impl)
    there_and_back(
        tmp_path, {"one": key, "many": jax.random.split(key, (2, 3)), "none": key[None][:0]}
    )


def test_a_key_of_another_kind_is_named(tmp_path) -> None:
    ft.save(tmp_path / "c", {"key": jax.random.key(0, impl="rbg")})
    with pytest.raises(ft.CheckpointMismatchError, match=r"key: expected key<urbg>.*got key<rbg>"):
        ft.load(tmp_path / "c", like={"key": jax.random.key(0, impl="unsafe_rbg")})


def params() -> dict[str, Any]:
    return {"dense": {"kernel": jnp.ones((4, 6)), "bias": jnp.zeros(6)}, "scale": jnp.ones(())}


def label(tree: Any) -> Any:
    return jax.tree.map(lambda x: "matrix" if x.ndim == 2 else "rest", tree)


OPTIMIZERS = {
    "multi_transform": optax.multi_transform(
        {"matrix": optax.adam(1), "rest": optax.sgd(1)}, label
    ),
    "masked": optax.masked(optax.adam(1), jax.tree.map(lambda x: x.ndim == 2, params())),
    "MultiSteps": optax.MultiSteps(optax.adam(1), 2).gradient_transformation(),
    "adafactor": optax.adafactor(1e-2, min_dim_size_to_factor=2),
    "lbfgs": optax.lbfgs(),
    "muon": optax.contrib.muon(1e-2),
    "schedule_free": optax.contrib.schedule_free_adamw(1e-2),
    "injected": optax.inject_hyperparams(optax.adamw)(1e-2),
    "apply_if_finite": optax.apply_if_finite(optax.sgd(1, momentum=0.9), 3),
    "lookahead": optax.chain(optax.clip(1.0), optax.add_noise(1, 0.9, jax.random.key(0))),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_the_state_of_every_optimizer_comes_back(tmp_path, name) -> None:
    tx = OPTIMIZERS[name]
    state = ft.TrainState.create(params=params(), tx=tx, rng=jax.random.key(1))
    there_and_back(tmp_path, state)


def test_states_in_dicts_and_stacked_states_come_back(tmp_path) -> None:
    tx = optax.adam(1e-3)
    one = ft.TrainState.create(params=params(), tx=tx, rng=jax.random.key(1))
    many = jax.vmap(
        lambda key: ft.TrainState.create(params=params(), tx=tx, rng=key).replace(params=params())
    )(jax.random.split(jax.random.key(0), 3))
    there_and_back(tmp_path, {"generator": one, "critics": [one, many], "none": None, "no": ()})


NAMES = {
    "separators": {"a/b": {"/": jnp.ones(1)}, "a": {"b/": jnp.zeros(2)}, "//": jnp.ones(3)},
    "dots": {
        ".": jnp.ones(1),
        "..": {"..": jnp.ones(2)},
        ".hidden": jnp.ones(3),
        "a.b": jnp.ones(4),
    },
    "unicode": {
        "é": jnp.ones(1),
        "e\u0301": jnp.ones(2),
        "層": {"🙂": jnp.ones(3)},
        "\u202e": jnp.ones(4),
    },
    "controls": {"\n": jnp.ones(1), "\0": jnp.ones(2), "\x7f\t": jnp.ones(3), " ": jnp.ones(4)},
    "quotes": {
        '"': jnp.ones(1),
        "'": jnp.ones(2),
        "\\": jnp.ones(3),
        "{}": jnp.ones(4),
        "%s": jnp.ones(5),
    },
    "cases": {"Name": jnp.ones(1), "name": jnp.ones(2), "NAME": jnp.ones(3)},
    "numbers": {0: jnp.ones(1), 10: {-1: jnp.ones(2)}},
    "bools_and_tuples": {(1, "a"): jnp.ones(1), (2, "b"): jnp.ones(2)},
    "names_of_the_file": {
        "state": jnp.ones(1),
        "documents": {"x": jnp.ones(2)},
        "(empty)": jnp.ones(3),
    },
    "names_of_orbax": {
        "_METADATA": jnp.ones(1),
        "manifest.ocdbt": jnp.ones(2),
        "zarr.json": jnp.ones(3),
    },
    "long": {"x" * 3000: {"y" * 3000: jnp.ones(1)}},
    "deep": None,
}
NAMES["deep"] = jnp.ones(1)
for depth in range(60):
    NAMES["deep"] = {f"block{depth}": NAMES["deep"]}


@pytest.mark.parametrize("name", NAMES)
def test_paths_of_any_kind_come_back(tmp_path, name) -> None:
    there_and_back(tmp_path, NAMES[name])


@pytest.mark.parametrize("layers", [250, pytest.param(2500, marks=pytest.mark.long)])
def test_many_leaves_come_back(tmp_path, layers) -> None:
    there_and_back(
        tmp_path, {f"layer{i}": {"w": np.full(3, i), "b": np.array(i)} for i in range(layers)}
    )


def test_arrays_in_any_layout_come_back(tmp_path) -> None:
    whole = np.arange(60.0).reshape(3, 4, 5)
    there_and_back(
        tmp_path,
        {
            "fortran": np.asfortranarray(whole),
            "strided": whole[::2, ::-1],
            "turned": whole.T,
            "spread": np.broadcast_to(np.float32(3), (4, 5)),
            "frozen": np.frombuffer(b"12345678", np.uint8),
            "jax": jnp.asarray(whole, jnp.float32).T,
        },
    )


@pytest.mark.parametrize(
    "leaf",
    [
        np.ma.masked_array([1.0, 2.0], [True, False]),
        np.zeros(2, [("a", "f4"), ("b", "O")]),
        np.zeros(2, [("a", "f4")]),
        np.array([1], object),
        np.array(["text"]),
        np.array(["2020-01-01"], "M8[D]"),
        np.zeros(2, "V4"),
        "text",
        1,
        1.0,
        None.__class__,
        lambda: 0,
    ],
    ids=lambda x: str(getattr(x, "dtype", type(x).__name__)),
)
def test_what_is_no_array_of_numbers_is_refused_before_anything_is_written(tmp_path, leaf) -> None:
    checkpoints = ft.Checkpointer(tmp_path / "d")
    with pytest.raises(TypeError, match=r"a/b: expected an array of numbers"):
        checkpoints.save({"a": {"b": leaf}, "c": jnp.ones(2)}, 1)
    assert checkpoints.steps() == []
    with pytest.raises(TypeError, match=r"a/b: expected an array of numbers"):
        ft.save(tmp_path / "c", {"a": {"b": leaf}})
    assert not (tmp_path / "c").exists()
    checkpoints.close()
