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


def test_the_states_of_optimizers_come_back(tmp_path) -> None:
    params = {"dense": {"kernel": jnp.ones((4, 6)), "bias": jnp.zeros(6)}, "scale": jnp.ones(())}
    matrices = jax.tree.map(lambda x: x.ndim == 2, params)
    states = {
        "masked": optax.masked(optax.adam(1), matrices).init(params),
        "MultiSteps": optax.MultiSteps(optax.adam(1), 2).init(params),
        "lbfgs": optax.lbfgs().init(params),
        "muon": optax.contrib.muon(1e-2).init(params),
        "injected": optax.inject_hyperparams(optax.adamw)(1e-2).init(params),
        "noise": optax.add_noise(1, 0.9, jax.random.key(0)).init(params),
    }
    there_and_back(tmp_path, states)


NAMES = [
    *("/", "//", "a.b", ".", "..", ".hidden", "é", "e\u0301", "層", "🙂", "\u202e", "\n", "\0"),
    *("\x7f\t", " ", '"', "'", "\\", "{}", "%s", "Name", "name", "NAME", "state", "(empty)"),
    *("x" * 3000, "documents", "_METADATA"),
]


def test_paths_of_any_kind_come_back(tmp_path) -> None:
    tree: Any = {name: {"b/": jnp.full(1, i), name: [jnp.ones(2)]} for i, name in enumerate(NAMES)}
    tree |= {"numbers": {0: jnp.ones(1), 10: {-1: jnp.ones(2)}}}
    tree |= {"tuples": {(1, "a"): jnp.ones(1), (2, "b"): jnp.ones(2)}}
    for depth in range(60):
        tree = {f"block{depth}": tree}
    there_and_back(tmp_path, tree)


@pytest.mark.parametrize(
    "tree",
    [
        {"complex": jnp.ones(2) * 1j, "empty": jnp.zeros((0, 3)), "host": np.zeros((2, 0), int)},
        {"scalar": np.float64(0.1), "f16": np.float16(1), "weak": jnp.array(True)},
        [jnp.ones(1), {}, (), None, [jnp.zeros(2)]],
        jnp.ones(3),
        {},
        None,
    ],
    ids=str,
)
def test_any_structure_comes_back(tmp_path, tree) -> None:
    there_and_back(tmp_path, tree)


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
    with pytest.raises(TypeError, match=r"a/b: expected an array of numbers"):
        ft.Checkpointer(tmp_path / "d").save({"a": {"b": leaf}, "c": jnp.ones(2)}, 1)
    assert not list(tmp_path.iterdir())
