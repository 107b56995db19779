"""Data go on where they were: no batch is repeated or left out, wherever the run was left."""

import contextlib
import pathlib
from typing import Any

import grain
import numpy as np
import pytest
from absl import flags

import functrain as ft
from functrain.checkpoint._errors import CheckpointMismatchError

from .lives import NEVER, START, bits, resumed_from_every_checkpoint, step, trained
from .rows import Rows, X


class Resumable:
    """A loader of a user's own: each epoch has another order."""

    def __init__(self, seed: int = 0, batch_size: int = 5, rows: np.ndarray = X) -> None:
        self.seed, self.batch_size, self.rows = seed, batch_size, rows
        self.epoch = self.at = 0

    def __iter__(self) -> Any:
        order = np.random.default_rng([self.seed, self.epoch]).permutation(len(self.rows))
        while self.at < len(self.rows):
            batch = self.rows[order[self.at : self.at + self.batch_size]]
            self.at += self.batch_size
            yield batch
        self.epoch, self.at = self.epoch + 1, 0

    def state_dict(self) -> Any:
        return {"epoch": self.epoch, "at": self.at}

    def load_state_dict(self, state: Any) -> None:
        self.epoch, self.at = state["epoch"], state["at"]


class Opaque:
    """Batches in an order of its own, the same each time, and no word about it."""

    def __init__(self, batch_size: int = 5, rows: np.ndarray = X) -> None:
        self.batch_size, self.rows = batch_size, rows

    def __iter__(self) -> Any:
        for i in range(0, len(self.rows), self.batch_size):
            yield self.rows[i : i + self.batch_size]


def map_dataset(seed: int = 1, batch_size: int = 5, rows: Any = None, drop: bool = False) -> Any:
    source = grain.MapDataset.source(Rows() if rows is None else rows)
    return source.shuffle(seed=seed).batch(batch_size, drop_remainder=drop)


def iter_dataset(batch_size: int = 5) -> Any:
    shuffled = grain.MapDataset.source(Rows()).seed(4).shuffle()
    return shuffled.repeat(2).to_iter_dataset().batch(batch_size)


def data_loader(seed: int = 3, batch_size: int = 5, workers: int = 0) -> Any:
    sampler = grain.samplers.IndexSampler(len(X), shuffle=True, seed=seed, num_epochs=1)
    batch = grain.transforms.Batch(batch_size)
    return grain.DataLoader(
        data_source=Rows(), sampler=sampler, operations=[batch], worker_count=workers
    )


def batches(batch_size: int = 5, rows: np.ndarray = X) -> list[np.ndarray]:
    return list(Opaque(batch_size, rows))


def noisy(batch: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    return batch + rng.normal(size=batch.shape).astype(np.float32)


EXACT = {
    "ArrayLoader": lambda: ft.ArrayLoader(X, 5, shuffle=True, seed=2),
    "ArrayLoader, on the device": lambda: ft.ArrayLoader(X, 5, shuffle=True, placement="device"),
    "ArrayLoader, remainder dropped": lambda: ft.ArrayLoader(X, 5, drop_remainder=True),
    "ArrayLoader, transform": lambda: ft.ArrayLoader(X, 5, shuffle=True, transform=noisy),
    "list": batches,
    "grain.MapDataset": map_dataset,
    "grain.MapDataset, remainder dropped": lambda: map_dataset(drop=True),
    "grain.IterDataset": iter_dataset,
    "grain.DataLoader": data_loader,
    "a user's own": Resumable,
}


@pytest.mark.parametrize("kind", EXACT)
def test_a_run_goes_on_from_every_step(kind: str, tmp_path: pathlib.Path) -> None:
    make = EXACT[kind]
    found = resumed_from_every_checkpoint(make, tmp_path, ft.every(steps=1), fuse=2)
    straight = trained(make())
    assert list(found) == list(range(1, int(straight.state["n"]) + 1))
    assert set(found.values()) == {bits(straight)}


@pytest.mark.parametrize("kind", ["list", "grain.MapDataset", "grain.DataLoader", "a user's own"])
@pytest.mark.parametrize("when", [ft.every(seconds=1e-9), ft.every(epochs=1)], ids=str)
def test_a_run_goes_on_where_a_chunk_met_the_end_of_the_data(
    kind: str, when: Any, tmp_path: pathlib.Path
) -> None:
    make = EXACT[kind]
    found = resumed_from_every_checkpoint(make, tmp_path, when, fuse=8)
    assert len(found) >= 2
    assert set(found.values()) == {bits(trained(make()))}


@pytest.mark.long
def test_worker_processes_go_on_too(tmp_path: pathlib.Path) -> None:
    flags.FLAGS.mark_as_parsed()  # grain hands them to its workers

    def make() -> Any:
        return data_loader(workers=1)

    whole = bits(trained(make()))
    with contextlib.suppress(KeyError):
        trained(make(), ft.Checkpointer(tmp_path, every=ft.at(3)), hooks=[failing_at(4)])
    assert bits(trained(make(), ft.Checkpointer(tmp_path))) == whole


def failing_at(n: int) -> Any:
    @ft.at(n)
    def fail(event: Any) -> None:
        raise KeyError(n)

    return fail


def left_at(folder: Any, data: Any, n: int, **more: Any) -> ft.Checkpointer:
    """A run that ended at a step, with a checkpoint of the step before it."""
    checkpointer = ft.Checkpointer(folder, every=ft.at(n - 1))
    with pytest.raises(KeyError):
        trained(data, checkpointer, hooks=[failing_at(n)], **more)
    return ft.Checkpointer(folder, every=NEVER)


def test_an_iterator_that_says_where_it_is_goes_on(tmp_path: pathlib.Path) -> None:
    whole = bits(trained(iter(iter_dataset()), epochs=1))
    checkpointer = left_at(tmp_path, iter(iter_dataset()), 4, epochs=1)
    assert bits(trained(iter(iter_dataset()), checkpointer, epochs=1)) == whole


def test_a_run_with_nothing_left_keeps_the_position_of_its_data(tmp_path: pathlib.Path) -> None:
    with pytest.raises(KeyError):
        trained(Resumable(), ft.Checkpointer(tmp_path), hooks=[failing_at(5)])
    for epochs in (1, 2):
        result = trained(Resumable(), ft.Checkpointer(tmp_path), epochs=epochs)
    assert bits(result) == bits(trained(Resumable()))


@pytest.mark.parametrize(("of", "epochs", "at"), [(iter, 1, 3), (lambda data: data, 2, 7)])
def test_other_iterables_are_fetched_again_with_a_word_about_it(
    of: Any, epochs: int, at: int, tmp_path: pathlib.Path
) -> None:
    taken = []

    class Counted(Opaque):
        def __iter__(self) -> Any:
            for batch in super().__iter__():
                taken.append(batch)
                yield batch

    checkpointer = left_at(tmp_path, of(Counted()), at, epochs=epochs)
    taken.clear()
    with pytest.warns(UserWarning, match="does not report its position. Its first 2 batches"):
        result = trained(of(Counted()), checkpointer, epochs=epochs)
    # A look at the data does not use up an iterator.
    assert len(taken) == len(batches())
    assert bits(result) == bits(trained(Opaque(), epochs=epochs))


def test_nothing_is_said_of_an_iterable_that_begins_an_epoch(tmp_path: pathlib.Path) -> None:
    checkpointer = ft.Checkpointer(tmp_path, every=ft.every(epochs=1))
    with pytest.raises(KeyError):
        trained(Opaque(), checkpointer, hooks=[failing_at(6)])
    assert bits(trained(Opaque(), ft.Checkpointer(tmp_path))) == bits(trained(Opaque()))


def loader(rows: np.ndarray = X, batch_size: int = 5, **more: Any) -> ft.ArrayLoader:
    return ft.ArrayLoader(rows, batch_size, **more)


OTHER_BATCH = r"batch: saved with float32\[5, 3\], now float32\[6, 3\]"
OTHER_NUMBERS = "the (first|last) batch: saved"
CHANGED: dict[str, tuple[Any, Any, str]] = {
    "batch size": (loader, lambda: loader(batch_size=6), "batch_size: saved with 5, now 6"),
    "seed": (
        lambda: loader(shuffle=True),
        lambda: loader(shuffle=True, seed=1),
        "seed: saved with 0, now 1",
    ),
    "length": (loader, lambda: loader(X[:-1]), "examples: saved with 17, now 16"),
    "values": (loader, lambda: loader(X + 1), "of the data: saved with"),
    "values on the device": (
        lambda: loader(placement="device"),
        lambda: loader(X + 1, placement="device"),
        "of the data: saved with",
    ),
    "another kind": (loader, batches, "data: saved with ArrayLoader, now list"),
    "list, number": (batches, lambda: batches()[:3], "batches: saved with 4, now 3"),
    "list, order": (batches, lambda: batches(rows=X[::-1]), OTHER_NUMBERS),
    "grain, length": (map_dataset, lambda: map_dataset(rows=X[:12]), "saved with 4, now 3"),
    "grain, examples": (map_dataset, lambda: map_dataset(rows=X[:-1]), OTHER_NUMBERS),
    "grain, seed": (map_dataset, lambda: map_dataset(seed=2), OTHER_NUMBERS),
    "grain.IterDataset": (iter_dataset, lambda: iter_dataset(batch_size=6), OTHER_BATCH),
    "grain.DataLoader, seed": (
        data_loader,
        lambda: data_loader(seed=4),
        "saved state of the data was rejected: ValueError.*Sampler",
    ),
    "grain.DataLoader, batch size": (data_loader, lambda: data_loader(batch_size=6), OTHER_BATCH),
    "a user's own, batch size": (Resumable, lambda: Resumable(batch_size=6), OTHER_BATCH),
    "a user's own, seed": (Resumable, lambda: Resumable(seed=1), OTHER_NUMBERS),
    "a user's own, length": (Resumable, lambda: Resumable(rows=X[:-1]), OTHER_NUMBERS),
}


@pytest.mark.parametrize("change", CHANGED)
def test_other_data_are_refused_before_anything_is_done(
    change: str, tmp_path: pathlib.Path
) -> None:
    before, after, message = CHANGED[change]
    rows = ft.hooks.CSVLogger(tmp_path / "log.csv", every=ft.every(steps=1))
    checkpointer = ft.Checkpointer(tmp_path / "c", every=ft.at(1))
    with pytest.raises(KeyError):
        trained(before(), checkpointer, hooks=[rows, failing_at(2)])
    written = (tmp_path / "log.csv").read_bytes()
    checkpointer = ft.Checkpointer(tmp_path / "c", every=NEVER)
    with pytest.raises(CheckpointMismatchError, match=f"(?s){message}.*start="):
        trained(after(), checkpointer, hooks=[rows])
    assert (tmp_path / "log.csv").read_bytes() == written
    assert checkpointer.steps() == [1]


@pytest.mark.filterwarnings("ignore:data. Opaque does not report")
def test_other_batches_of_an_iterable_are_refused(tmp_path: pathlib.Path) -> None:
    left_at(tmp_path, Opaque(), 3)
    with pytest.raises(CheckpointMismatchError, match=r"first batch: saved with float32\[5, 3\]"):
        trained(Opaque(batch_size=6), ft.Checkpointer(tmp_path))


def test_other_data_are_taken_by_hand(tmp_path: pathlib.Path) -> None:
    checkpointer = left_at(tmp_path / "a", ft.ArrayLoader(X, 5, shuffle=True), 7)
    found = checkpointer.restore(like=START)
    after = ft.ArrayLoader(X[:-1], 5, shuffle=True)
    with ft.Checkpointer(tmp_path / "b") as other:
        result = ft.fit(
            found.state, step, after, epochs=2, start=found.position, checkpointer=other, verbose=0
        )
    assert int(result.state["n"]) == 8


def test_numbers_that_no_state_holds_are_named(tmp_path: pathlib.Path) -> None:
    random = np.random.default_rng()

    class Noisy(Resumable):
        def __iter__(self) -> Any:
            for batch in super().__iter__():
                yield batch + random.normal(size=batch.shape).astype(np.float32)

    checkpointer = left_at(tmp_path, Noisy(), 3)
    with pytest.warns(UserWarning, match="gives other numbers each time.* not bit for bit"):
        assert int(trained(Noisy(), checkpointer).state["n"]) == 8


def test_numbers_that_another_machine_rounds_otherwise_are_the_same(
    tmp_path: pathlib.Path,
) -> None:
    checkpointer = left_at(tmp_path, Resumable(), 3)
    other = np.nextafter(X, np.float32(np.inf))
    assert int(trained(Resumable(rows=other), checkpointer).state["n"]) == 8


def test_a_batch_that_cannot_be_had_ends_the_run_and_not_the_checkpoint(
    tmp_path: pathlib.Path,
) -> None:
    class Shaky(Resumable):
        fails = True

        def __iter__(self) -> Any:
            for n, batch in enumerate(super().__iter__()):
                if self.fails and self.epoch == 1 and n == 2:
                    raise OSError("no such file")
                yield batch

    checkpointer = ft.Checkpointer(tmp_path, every=ft.every(seconds=1e-9))
    with pytest.raises(OSError, match="no such file"):
        trained(Shaky(), checkpointer, fuse=4)
    assert checkpointer.latest() == 6
    Shaky.fails = False
    assert bits(trained(Shaky(), ft.Checkpointer(tmp_path))) == bits(trained(Resumable()))
