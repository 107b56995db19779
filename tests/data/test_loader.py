import array

import hypothesis
import jax
import numpy as np
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
    with pytest.raises(ValueError, match="read-only"):
        a.order(5)[:] = 0
    flat(b, 1)
    np.testing.assert_array_equal(flat(b, 5), late)
    np.testing.assert_array_equal(flat(ArrayLoader(X, 7, shuffle=True, seed=3), 5), late)
    assert not np.array_equal(flat(a, 6), late)
    assert not np.array_equal(flat(ArrayLoader(X, 10, shuffle=True, seed=4), 5), late)


@pytest.mark.smoke
def test_any_position_can_be_sought() -> None:
    loader = ArrayLoader(X, 10, shuffle=True)
    batches = list(loader.epoch(1))
    np.testing.assert_array_equal(loader.batch(1, 4), batches[4])
    np.testing.assert_array_equal(next(loader.epoch(1, start=7)), batches[7])
    np.testing.assert_array_equal(loader.chunk(1, 2, 3), np.stack(batches[2:5]))


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


def test_large_seeds_have_orders_of_their_own() -> None:
    orders = [ArrayLoader(X, 10, shuffle=True, seed=2**63 + i).order(1) for i in (0, 1)]
    assert not np.array_equal(*orders)


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


def test_sequences_and_buffers_are_arrays() -> None:
    for data in (range(10), memoryview(bytes(range(10))), array.array("i", range(10))):
        assert flat(ArrayLoader(data, 4), 0).tolist() == list(range(10))


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


def test_a_transform_may_change_shapes_and_makes_batches_for_every_function() -> None:
    def pick(batch, rng):
        return batch["x"][:, None].astype(np.float16)

    loader = ArrayLoader(DATA, 4, transform=pick)
    outputs = ft.predict(0, lambda s, x: (s, 3 * x), loader)
    np.testing.assert_array_equal(outputs, 3 * DATA["x"][:, None].astype(np.float16))
    members = ft.population.Loader([loader, loader])
    assert members.chunk(0, 1, 2).shape == (2, 2, 4, 1)


# Methods that a subclass may have, and the batches that they make of `arange(10)`.
OVERRIDES = {
    "batch": (
        lambda self, epoch, index: 2 * ArrayLoader.batch(self, epoch, index),
        [[0, 2, 4, 6], [8, 10, 12, 14], [16, 18]],
    ),
    "order": (
        lambda self, epoch: ArrayLoader.order(self, epoch)[::-1],
        [[9, 8, 7, 6], [5, 4, 3, 2], [1, 0]],
    ),
    "epoch": (
        lambda self, *at: (batch**2 for batch in ArrayLoader.epoch(self, *at)),
        [[0, 1, 4, 9], [16, 25, 36, 49], [64, 81]],
    ),
    "__len__": (lambda self: 2, [[0, 1, 2, 3], [4, 5, 6, 7]]),
    "__iter__": (lambda self: iter([np.full(4, 7)] * 2), [[7] * 4] * 2),
}


@pytest.mark.parametrize("placement", ["host", "device"])
@pytest.mark.parametrize("name", OVERRIDES)
def test_what_a_subclass_overrides_acts_on_every_batch(name, placement) -> None:
    method, expected = OVERRIDES[name]
    subclass = type("Subclass", (ArrayLoader,), {name: method})
    loader = subclass(np.arange(10), 4, placement=placement)
    assert [batch.tolist() for batch in loader] == expected
    for fuse in (1, 2, 3):
        steps = ft.fit(0, lambda s, b: (s, {"sum": b.sum()}), loader, fuse=fuse, verbose=0)
        assert steps.history.steps["sum"].tolist() == [sum(batch) for batch in expected]


# -------------------------------------------------------------------------------------------------


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


def test_a_loader_is_shown_with_its_settings() -> None:
    assert repr(ArrayLoader(X, 10, shuffle=True, seed=3)) == (
        "ArrayLoader(examples=103, batch_size=10, shuffle=True, seed=3, drop_remainder=False, "
        "placement='auto')"
    )
