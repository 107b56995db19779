import array
import collections
import dataclasses

import hypothesis
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hypothesis import strategies as st

import functrain as ft
from functrain import ArrayLoader

X = np.arange(103)


def flat(loader, epoch):
    return np.concatenate(list(loader.epoch(epoch)))


@hypothesis.given(
    n=st.integers(1, 60),
    batch=st.integers(1, 60),
    shuffle=st.booleans(),
    drop=st.booleans(),
    epoch=st.integers(0, 3),
)
@hypothesis.settings(deadline=None, max_examples=60)
def test_an_epoch_shows_every_example_once(n, batch, shuffle, drop, epoch) -> None:
    batch = min(n, batch) if drop else batch
    loader = ArrayLoader(np.arange(n), batch, shuffle=shuffle, drop_remainder=drop)
    batches = list(loader.epoch(epoch))
    assert len(batches) == len(loader)
    seen = np.concatenate(batches)
    assert len(seen) == (n // batch * batch if drop else n)
    assert len(set(seen.tolist())) == len(seen)


def test_the_order_is_a_pure_function_of_seed_and_epoch() -> None:
    a = ArrayLoader(X, 10, shuffle=True, seed=3)
    b = ArrayLoader(X, 10, shuffle=True, seed=3)
    late = flat(a, 5)
    flat(b, 1)
    np.testing.assert_array_equal(flat(b, 5), late)
    assert not np.array_equal(flat(a, 6), late)
    assert not np.array_equal(flat(ArrayLoader(X, 10, shuffle=True, seed=4), 5), late)


def test_the_order_does_not_depend_on_the_batch_size() -> None:
    a, b = (ArrayLoader(X, size, shuffle=True, seed=3) for size in (10, 7))
    np.testing.assert_array_equal(flat(a, 2), flat(b, 2))


@pytest.mark.smoke
def test_any_position_can_be_sought() -> None:
    loader = ArrayLoader(X, 10, shuffle=True)
    batches = list(loader.epoch(1))
    np.testing.assert_array_equal(loader.batch(1, 4), batches[4])
    np.testing.assert_array_equal(next(loader.epoch(1, start=7)), batches[7])
    np.testing.assert_array_equal(loader.chunk(1, 2, 3), np.stack(batches[2:5]))


def test_leaves_of_a_tree_stay_together() -> None:
    loader = ArrayLoader({"x": X, "y": (2 * X[:, None], X.astype(np.uint8))}, 10, shuffle=True)
    for batch in loader.epoch(0):
        np.testing.assert_array_equal(2 * batch["x"][:, None], batch["y"][0])
        assert batch["y"][1].dtype == np.uint8


def test_batches_are_copies(tmp_path) -> None:
    data = X.copy()
    batch = next(ArrayLoader(data, 10).epoch(0))
    batch[:] = -1
    np.testing.assert_array_equal(data, X)


def test_an_order_is_that_of_its_epoch_though_another_thread_comes_between() -> None:
    loader = ArrayLoader(X, 10, shuffle=True)
    expected = loader.order(3)

    class Interrupted(int):
        """The number of an epoch, at whose comparison another thread reads another order."""

        def __ne__(self, other):
            loader.order(0)
            return int(self) != other

    np.testing.assert_array_equal(loader.order(Interrupted(3)), expected)


def test_arrays_changed_at_the_last_chunk_of_an_epoch_make_the_whole_next_epoch() -> None:
    x = np.zeros(12, np.float32)
    loader = ArrayLoader(x, 2)

    @ft.every(steps=len(loader))
    def change(event):
        x[:] += 1

    def step(state, batch):
        return state, {"x": batch[0]}

    _, history = ft.fit(0, step, loader, epochs=2, hooks=[change], fuse=4, verbose=0)
    assert history.steps["x"].tolist() == [0] * 6 + [1] * 6


def test_memory_mapped_data_stays_on_disk(tmp_path) -> None:
    np.save(tmp_path / "x.npy", X)
    loader = ArrayLoader(np.load(tmp_path / "x.npy", mmap_mode="r"), 10)
    assert isinstance(loader.data.base, np.memmap) or isinstance(loader.data, np.memmap)
    np.testing.assert_array_equal(flat(loader, 0), X)


@pytest.mark.parametrize(
    ("data", "batch_size", "message"),
    [
        (X, 0, "batch_size: expected an integer from 1, got 0"),
        (X, None, "batch_size: expected an integer from 1, got None"),
        (X, 10.0, "batch_size: expected an integer from 1, got 10"),
        (X, X, r"got int64\[103\]\. Pass ArrayLoader\(\(x, y\), batch_size\)"),
        ((), 1, "with at least one leaf"),
        (np.zeros((0, 3)), 1, "expected at least one example, got float64"),
        ((X, X[:50]), 1, r"(?s)leaves of one length.*0: .*103.*1: .*50"),
        ({"x": X, "n": 3}, 1, r"n: int64\[\]"),
    ],
)
def test_data_that_makes_no_batches_is_refused(data, batch_size, message) -> None:
    with pytest.raises(ValueError, match=message):
        ArrayLoader(data, batch_size)


def test_large_seeds_have_orders_of_their_own() -> None:
    orders = [ArrayLoader(X, 10, shuffle=True, seed=2**63 + i).order(1) for i in (0, 1)]
    assert not np.array_equal(*orders)
    for seed in (2**64, -1, 0.5, True):
        with pytest.raises(ValueError, match="seed: expected an integer from 0 to 2"):
            ArrayLoader(X, 10, seed=seed)


def test_iterating_yields_the_batches_of_epoch_0_each_time() -> None:
    loader = ArrayLoader(X, 10, shuffle=True)
    for _ in range(2):
        np.testing.assert_array_equal(np.concatenate(list(loader)), flat(loader, 0))
    assert all(type(batch) is np.ndarray for batch in loader)


@pytest.mark.parametrize("placement", ["host", "device"])
def test_a_batch_size_above_the_number_of_examples_is_one_smaller_batch(placement) -> None:
    large, exact = (ArrayLoader(X, n, shuffle=True, placement=placement) for n in (500, 103))
    assert len(large) == 1
    np.testing.assert_array_equal(flat(large, 2), flat(exact, 2))

    def step(total, x):
        return total + x.sum(), {"examples": x.shape[0]}

    state, history = ft.fit(0, step, large, epochs=2, verbose=0)
    assert int(state) == 2 * X.sum()
    assert history.steps["examples"].tolist() == [103, 103]
    with pytest.raises(ValueError, match="1 to 103, the number of examples, with drop_remainder"):
        ArrayLoader(X, 104, drop_remainder=True)


class MapStyle:
    """A dataset as torch has them, which raises no IndexError."""

    def __len__(self) -> int:
        return 10

    def __getitem__(self, i: int) -> tuple[np.ndarray, int]:
        return np.full(3, i), i


@pytest.mark.parametrize("data", [MapStyle(), {"x": np.ones(10), "y": MapStyle()}])
def test_a_dataset_that_is_read_item_by_item_is_refused_at_once(data) -> None:
    with pytest.raises(TypeError, match=r"data: expected arrays, got MapStyle at .*np\.stack"):
        ArrayLoader(data, 2)
    with pytest.raises(TypeError, match=r"data: expected arrays, got MapStyle at .* of batch 0"):
        ft.fit(0, lambda s, b: (s, {}), [{"data": data}], verbose=0)


def test_sequences_and_buffers_are_arrays() -> None:
    for data in (range(10), memoryview(bytes(range(10))), array.array("i", range(10))):
        assert flat(ArrayLoader(data, 4), 0).tolist() == list(range(10))


def test_the_order_of_an_epoch_cannot_be_changed_by_a_reader() -> None:
    loader = ArrayLoader(X, 10, shuffle=True)
    with pytest.raises(ValueError, match="read-only"):
        loader.order(0)[:] = 0
    assert sorted(flat(loader, 0)) == X.tolist()


# --- transform, and subclasses -------------------------------------------------------------------


def mark(state, batch):
    """A step that logs what identifies a batch."""
    return state, {"sum": batch["x"].sum(), "noise": batch["noise"].sum()}


def noisy(batch, rng):
    x = batch["x"]
    assert isinstance(x, np.ndarray)
    x *= 2
    return {"x": x, "noise": rng.normal(size=len(x)).astype(np.float32)}


DATA = {"x": np.arange(23, dtype=np.float32)}


@pytest.mark.parametrize("shuffle", [True, False])
def test_a_transform_runs_for_every_batch_whatever_k_is(shuffle) -> None:
    loader = ArrayLoader(DATA, 4, shuffle=shuffle, seed=7, transform=noisy)
    plain = ArrayLoader(DATA, 4, shuffle=shuffle, seed=7)
    expected = [2 * b["x"].sum() for epoch in range(2) for b in plain.epoch(epoch)]
    noise = [b["noise"].sum() for epoch in range(2) for b in loader.epoch(epoch)]
    assert len(set(noise)) == 12, "every batch of every epoch has its own generator"
    for fuse in (1, 3, 100):
        history = ft.fit(0, mark, loader, epochs=2, fuse=fuse, verbose=0).history
        np.testing.assert_allclose(history.steps["sum"], expected, rtol=1e-6)
        np.testing.assert_allclose(history.steps["noise"], noise, rtol=1e-5)
    assert DATA["x"].tolist() == list(range(23)), "a transform gets copies"
    chunk = loader.chunk(1, 1, 3)
    for i, batch in zip(range(3), loader.epoch(1, 1), strict=False):
        np.testing.assert_array_equal(chunk["noise"][i], batch["noise"])


def test_a_transform_is_called_once_for_each_batch() -> None:
    sizes = []

    def count(batch, rng):
        sizes.append(len(batch))
        return batch

    loader = ArrayLoader(X.astype(np.float32), 25, transform=count)
    step = ft.fit(0.0, lambda s, b: (s + b.sum(), {}), loader, epochs=2, fuse=3, verbose=0)
    assert float(step.state) == 2 * X.sum()
    assert sizes == [25, 25, 25, 25, 3] * 2


def test_a_transform_goes_on_where_a_killed_run_stopped(tmp_path) -> None:
    loader = ArrayLoader(DATA, 4, shuffle=True, transform=noisy)

    def train(*hooks):
        saves = ft.Checkpointer(tmp_path, every=ft.every(steps=1))
        return ft.fit(0, mark, loader, epochs=3, verbose=0, checkpointer=saves, hooks=hooks)

    @ft.at(8)
    def fail(event):
        raise KeyError

    with pytest.raises(KeyError):
        train(fail)
    expected = ft.fit(0, mark, loader, epochs=3, verbose=0).history.steps["noise"]
    np.testing.assert_array_equal(train().history.steps["noise"], expected)


def test_a_transform_may_change_shapes_and_makes_batches_for_every_function() -> None:
    def pick(batch, rng):
        return batch["x"][:, None].astype(np.float16)

    loader = ArrayLoader(DATA, 4, transform=pick)
    outputs = ft.predict(0, lambda s, x: (s, 3 * x), loader)
    np.testing.assert_array_equal(outputs, 3 * DATA["x"][:, None].astype(np.float16))
    members = ft.population.Loader([loader, loader])
    assert members.chunk(0, 1, 2).shape == (2, 2, 4, 1)


@pytest.mark.parametrize(
    ("how", "error", "message"),
    [
        ({"transform": 3}, TypeError, r"transform: expected a function transform\(batch, rng\)"),
        ({"transform": lambda batch: batch}, TypeError, "got <lambda>"),
        (
            {"transform": noisy, "placement": "device"},
            ValueError,
            "placement: expected 'host' with a transform, got 'device'",
        ),
    ],
)
def test_what_is_no_transform_is_refused_when_the_loader_is_made(how, error, message) -> None:
    with pytest.raises(error, match=message):
        ArrayLoader(DATA, 4, **how)


class Doubled(ArrayLoader):
    def batch(self, epoch, index):
        return 2 * super().batch(epoch, index)


class Reversed(ArrayLoader):
    def order(self, epoch):
        return super().order(epoch)[::-1]


class Squares(ArrayLoader):
    def epoch(self, epoch, start=0):
        return (batch**2 for batch in super().epoch(epoch, start))


class Two(ArrayLoader):
    def __len__(self):
        return 2


class Sevens(ArrayLoader):
    def __iter__(self):
        return iter([np.full(4, 7)] * 2)


@pytest.mark.parametrize("placement", ["host", "device"])
@pytest.mark.parametrize(
    ("loader", "expected"),
    [
        (Doubled, [[0, 2, 4, 6], [8, 10, 12, 14], [16, 18]]),
        (Reversed, [[9, 8, 7, 6], [5, 4, 3, 2], [1, 0]]),
        (Squares, [[0, 1, 4, 9], [16, 25, 36, 49], [64, 81]]),
        (Two, [[0, 1, 2, 3], [4, 5, 6, 7]]),
        (Sevens, [[7] * 4] * 2),
    ],
)
def test_what_a_subclass_overrides_acts_on_every_batch(loader, expected, placement) -> None:
    loader = loader(np.arange(10), 4, placement=placement)
    assert [batch.tolist() for batch in loader] == expected
    for fuse in (1, 2, 3):
        steps = ft.fit(0, lambda s, b: (s, {"sum": b.sum()}), loader, fuse=fuse, verbose=0)
        assert steps.history.steps["sum"].tolist() == [sum(batch) for batch in expected]


@pytest.mark.parametrize("placement", ["host", "device"])
def test_other_values_are_refused_on_resume_as_those_of_a_list_are(tmp_path, placement) -> None:
    def train(x, epochs):
        loader = ArrayLoader({"x": x}, 4, placement=placement)
        saves = ft.Checkpointer(tmp_path)
        step = lambda s, b: (s + b["x"].sum(), {})  # noqa: E731
        return ft.fit(0.0, step, loader, epochs=epochs, verbose=0, checkpointer=saves).state

    x = np.random.default_rng(0).normal(size=(23, 3)).astype(np.float32)
    train(x, 1)
    train(x.copy(), 2)
    with pytest.raises(ValueError, match="x of the data: saved with"):
        train(x + 1, 3)
    one = x.copy()
    one[-1, -1] = 7
    with pytest.raises(ValueError, match=rf"x of the data: saved with {x[-1, -1]:.4g}, now 7\n"):
        train(one, 3)


# -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("where", [(-1, 1), (8, 3), (0, 0)])
def test_chunks_beyond_the_full_batches_are_refused(where) -> None:
    with pytest.raises(IndexError, match="expected full batches, 0 to 9"):
        ArrayLoader(X, 10).chunk(0, *where)


@pytest.mark.parametrize("shuffle", [True, False])
def test_data_on_the_device_gives_the_same_batches(shuffle) -> None:
    data = {"x": X.astype(np.float32), "y": X.astype(np.uint8)[:, None]}
    host, device = (
        ArrayLoader(data, 10, shuffle=shuffle, seed=1, placement=where)
        for where in ("host", "device")
    )
    for a, b in zip(host.epoch(1), device.epoch(1), strict=True):
        assert isinstance(b["x"], jax.Array)
        jax.tree.map(lambda x, y: np.testing.assert_array_equal(x, y, strict=True), a, b)
    assert device.chunk(0, 2, 3)["y"].shape == (3, 10, 1)
    with pytest.raises(ValueError, match="placement: expected 'host' or 'device'"):
        ArrayLoader(data, 10, placement="disk")


@pytest.mark.parametrize("shuffle", [False, True])
@pytest.mark.parametrize("placement", ["host", "device"])
@pytest.mark.parametrize("dtype", [">f4", ">i2", ">c8"])
def test_data_of_the_other_byte_order_comes_in_the_machines(shuffle, placement, dtype) -> None:
    how = {"shuffle": shuffle, "placement": placement}
    values = np.arange(20).reshape(10, 2)
    theirs = ArrayLoader(values.astype(dtype), 4, **how)
    ours = ArrayLoader(values.astype(np.dtype(dtype).newbyteorder("=")), 4, **how)
    double = jax.jit(lambda x: 2 * x)
    for a, b in zip(theirs.epoch(1), ours.epoch(1), strict=True):
        assert np.dtype(a.dtype).isnative
        np.testing.assert_array_equal(double(b), double(a))
    assert np.dtype(theirs.chunk(0, 0, 2).dtype).isnative


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
    with pytest.raises(TypeError, match="1,000,000 ints"):
        ArrayLoader((list(range(1_000_000)), np.zeros(1_000_000)), 32)


def test_a_loader_is_shown_with_its_settings() -> None:
    assert repr(ArrayLoader(X, 10, shuffle=True, seed=3)) == (
        "ArrayLoader(examples=103, batch_size=10, shuffle=True, seed=3, drop_remainder=False, "
        "placement='host')"
    )


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


def test_integers_that_jax_would_cut_are_refused_at_every_door() -> None:
    def step(state, batch):
        return state, {"n": jnp.sum(batch["ids"])}

    batches = [{"ids": np.array([1, 2])}, {"ids": np.array([3, LARGE])}]
    message = rf"^data: expected integers at ids that fit into int32.* got {LARGE} in int64\[2, 2\]"
    with pytest.raises(ValueError, match=message):
        ft.fit(jnp.zeros(()), step, batches, verbose=0, fuse=2)
    with pytest.raises(ValueError, match=message):
        ft.predict(jnp.zeros(()), lambda s, b: (s, b["ids"]), batches, fuse=2)
    state = {"seen": np.int64(LARGE)}
    metered = ft.MeteredStep(lambda s, b: (s, 0.0, ft.Aux()), ft.metrics.collection({}))
    evaluating = dataclasses.replace(metered, trains=False)
    for call in (
        lambda: ft.fit(state, step, batches[:1], verbose=0),
        lambda: ft.run(state, step, batches[:1]),
        lambda: ft.evaluate(state, evaluating, batches[:1]),
        lambda: ft.predict(state, lambda s, b: (s, b["ids"]), batches[:1]),
    ):
        with pytest.raises(ValueError, match=rf"expected integers at seen .* {LARGE} in"):
            call()
    with pytest.raises(ValueError, match="expected integers at seen that fit into int32"):
        ft.TrainState.create(params={}, tx=optax.sgd(0.1), model_state={"seen": LARGE})
    with pytest.raises(ValueError, match=r"^fused: .* integers at chunk/ids that fit into int32"):
        ft.fuse(step, 2)(jnp.zeros(()), {"ids": np.array([[1], [LARGE]])})
