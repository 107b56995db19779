"""Data that a loader or a run refuses, before it computes anything with them."""

import collections

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import functrain as ft
from functrain import ArrayLoader

X = np.arange(103)


@pytest.mark.parametrize(
    ("data", "batch_size", "message"),
    [
        (X, 0, "batch_size: expected an integer from 1, got 0"),
        (X, X, r"got int64\[103\]\. Pass ArrayLoader\(\(x, y\), batch_size\)"),
        ((), 1, "expected arrays of one length"),
        (np.zeros((0, 3)), 1, r"at least 1, got\s+\(root\): float64"),
        ((X, X[:50]), 1, r"(?s)arrays of one length.*0: .*103.*1: .*50"),
        ({"x": X, "n": 3}, 1, r"n: int64\[\]"),
    ],
)
def test_data_that_makes_no_batches_is_refused(data, batch_size, message) -> None:
    with pytest.raises(ValueError, match=message):
        ArrayLoader(data, batch_size)


class MapStyle:
    """A dataset as torch has them, which raises no IndexError."""

    def __getitem__(self, i: int) -> tuple[np.ndarray, int]:
        return np.full(3, i), i


def test_a_dataset_that_is_read_item_by_item_is_refused_at_once() -> None:
    data = {"x": np.ones(10), "y": MapStyle()}
    with pytest.raises(TypeError, match=r"data: expected arrays, got MapStyle at y.*np\.stack"):
        ArrayLoader(data, 2)
    with pytest.raises(TypeError, match=r"data: expected arrays, got MapStyle at y of batch 0"):
        ft.fit(0, lambda s, b: (s, {}), [data], verbose=0)


@pytest.mark.parametrize(
    ("how", "error", "message"),
    [
        (
            {"transform": max, "placement": "device"},
            ValueError,
            "expected 'auto' or 'host' with a transform",
        ),
        ({"placement": "disk"}, ValueError, "placement: expected 'auto' or 'host' or 'device'"),
        ({"seed": 2**64}, ValueError, "seed: expected an integer from 0 to 2"),
        ({"seed": -1}, ValueError, "seed: expected an integer from 0 to 2"),
        ({"seed": 0.5}, ValueError, "seed: expected an integer from 0 to 2"),
    ],
)
def test_settings_that_make_no_sense_are_refused(how, error, message) -> None:
    with pytest.raises(error, match=message):
        ArrayLoader(X, 4, **how)


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (np.array(["a", "b"]), r"got ndarray of <U1 at x\. .* replace strings by ids"),
        (np.array([[1, 2], [3]], dtype=object), "object at x. .* pad rows of unequal length"),
        (np.zeros(2, np.longdouble), "float128 at x. Cast it"),
        (np.zeros(2, "M8[s]"), "datetime64"),
        ([1, 2, 3, 4], r"got a list of 4 ints\. Make it an array"),
        ((["good", "bad"], np.zeros(2)), "got a list of 2 strs"),
        (collections.UserDict(x=X), r"got UserDict at x\."),
    ],
)
def test_data_that_jax_cannot_take_is_refused_in_words(data, message) -> None:
    with pytest.raises(TypeError, match=rf"data: expected arrays.*{message}"):
        ArrayLoader({"x": data}, 1)


def test_a_long_list_of_numbers_is_refused_before_it_is_gone_through() -> None:
    class Long(list):
        """Long enough to be seen going through."""

        def __iter__(self):
            raise AssertionError("gone through")

    data = Long(range(1_000_000))
    with pytest.raises(TypeError, match=r"data: expected arrays, got a Long of 1,000,000 ints"):
        ArrayLoader(data, 32)


LARGE = 2**40  # 0 in 32 bits


PAIRS = [  # integers that jax cannot hold, and those next to them that it can
    (np.array([0, 1, 2**31]), np.array([0, 1, 2**31 - 1])),
    (np.array([0, -(2**31) - 1, 1]), np.array([0, -(2**31), 1])),
    (np.array([0, 1, 2**32], np.uint64), np.array([0, 1, 2**32 - 1], np.uint64)),
    (np.array([0, 1, LARGE], ">i8"), np.array([0, 1, 9], ">i8")),
]


@pytest.mark.parametrize(("wrong", "right"), PAIRS)
@pytest.mark.parametrize("placement", ["host", "device"])
def test_integers_that_jax_would_cut_are_refused_with_the_largest_that_fit(
    wrong, right, placement
) -> None:
    with pytest.raises(ValueError, match=r"^data: .* integers at labels that fit into u?int32"):
        ArrayLoader({"x": np.ones(3), "labels": wrong}, 3, placement=placement)
    loader = ArrayLoader({"x": np.ones(3), "labels": right}, 3, placement=placement)
    np.testing.assert_array_equal(jnp.asarray(loader.batch(0, 0)["labels"]), right)


def test_with_64_bit_types_no_integer_is_refused() -> None:
    with jax.enable_x64(True):
        loader = ArrayLoader(np.array([1, LARGE]), 2)
        assert jnp.asarray(loader.batch(0, 0))[1] == LARGE


def test_of_what_lies_on_disk_or_in_windows_the_chunks_are_looked_at(tmp_path) -> None:
    ids = np.arange(40)
    ids[33] = LARGE
    np.save(tmp_path / "ids.npy", ids)
    mapped = np.load(tmp_path / "ids.npy", mmap_mode="r")
    windows = np.lib.stride_tricks.sliding_window_view(ids, 2)
    for data in (mapped, windows):
        loader = ArrayLoader(data, 4)
        loader.chunk(0, 0, 4)
        with pytest.raises(ValueError, match=f"^data: expected integers that .* got {LARGE} in"):
            loader.chunk(0, 8, 1)
        with pytest.raises(ValueError, match="jax_enable_x64"):
            ArrayLoader(data, 4, shuffle=True).chunk(0, 0, 9)


def test_integers_of_other_batches_that_jax_would_cut_are_refused() -> None:
    batches = [{"ids": np.array([1, 2])}, {"ids": np.array([3, LARGE])}]
    message = rf"^data: expected integers at ids that fit into int32.* got {LARGE} in int64\[2, 2\]"
    with pytest.raises(ValueError, match=message):
        ft.fit(0, lambda s, b: (s, {}), batches, verbose=0, fuse=2)
    with pytest.raises(ValueError, match=message):
        ft.predict(0, lambda s, b: (s, b["ids"]), batches, fuse=2)
