"""torchdata's loaders go on where they were. `make test-adapters` has them; elsewhere: skipped."""

import pathlib
import warnings
from typing import Any

import pytest

import functrain as ft

from .lives import NEVER, bits, resumed_from_every_checkpoint, trained
from .rows import Rows, X

pytestmark = [
    pytest.mark.adapters,
    pytest.mark.filterwarnings("ignore::UserWarning:torchdata"),  # it asks torch what is deprecated
]


def library() -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        pytest.importorskip("torchdata")
        import torchdata.stateful_dataloader.sampler

    return torchdata.stateful_dataloader


def loader(rows: Any = X, batch_size: int = 5, seed: int = 0, **more: Any) -> Any:
    import torch

    stateful = library()
    # The loader's own generator would serve for the seeds of workers as well: torchdata 0.11 goes
    # on with it to the end of the epoch, and has another order in the next.
    generator = torch.Generator().manual_seed(seed)
    sampler = stateful.sampler.RandomSampler(Rows(rows), generator=generator)
    return stateful.StatefulDataLoader(Rows(rows), batch_size, sampler=sampler, **more)


def with_seeds_of_its_own() -> Any:
    return library().StatefulDataLoader(Rows(), 5, shuffle=True)


WAYS = {
    "in order": lambda: library().StatefulDataLoader(Rows(), 5),
    "shuffled": loader,
    "remainder dropped": lambda: loader(drop_last=True),
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("when", [ft.every(steps=1), ft.every(seconds=1e-9), ft.every(epochs=1)])
def test_a_loader_goes_on_at_every_step(way: str, when: Any, tmp_path: pathlib.Path) -> None:
    library()
    make = WAYS[way]
    found = resumed_from_every_checkpoint(make, tmp_path, when, fuse=8)
    assert len(found) >= 2
    assert set(found.values()) == {bits(trained(make()))}


@pytest.mark.parametrize("persistent", [False, True])
def test_a_loader_with_a_worker_goes_on(persistent: bool, tmp_path: pathlib.Path) -> None:
    library()

    def make() -> Any:
        return loader(
            num_workers=1, persistent_workers=persistent, multiprocessing_context="forkserver"
        )

    found = resumed_from_every_checkpoint(make, tmp_path, ft.at(3), fuse=2)
    assert list(found) == [3, 8]
    assert found[3] == found[8]  # what the training came to that never ended


def test_a_loader_that_draws_its_own_seed_goes_on_with_that(tmp_path: pathlib.Path) -> None:
    library()
    checkpointer = ft.Checkpointer(tmp_path, every=ft.at(3, 6), keep=None)
    whole = bits(trained(with_seeds_of_its_own(), checkpointer))
    for step in (6, 3):
        again = ft.Checkpointer(tmp_path, every=NEVER)
        again.rollback(step)
        assert bits(trained(with_seeds_of_its_own(), again)) == whole
