"""A small training that tells batches apart, and how it goes on from each checkpoint."""

import shutil
from typing import Any

import jax.numpy as jnp

import functrain as ft

from ..conftest import digest

EPOCHS = 2
NEVER = ft.at(10**9)
START = {"w": jnp.ones(3), "n": jnp.zeros((), jnp.int32)}


def step(state: Any, batch: Any) -> Any:
    x = batch.astype(jnp.float32)
    return {"w": 0.9 * state["w"] + x.mean(0), "n": state["n"] + 1}, {"sum": x.sum()}


def trained(data: Any, checkpointer: Any = None, **more: Any) -> ft.FitResult[Any]:
    settings = {"epochs": EPOCHS, "fuse": 2, "verbose": 0} | more
    return ft.fit(START, step, data, checkpointer=checkpointer, **settings)


def bits(result: ft.FitResult[Any]) -> str:
    """A hash of the state and of the history, all but seconds."""
    history = result.history
    epochs = {name: x for name, x in history.epochs.items() if name != "seconds"}
    return digest((result.state, history.steps, epochs, history.within_epochs))


def resumed_from_every_checkpoint(make: Any, folder: Any, every: Any, fuse: int) -> dict[int, str]:
    """Trains once, and goes on from each of the checkpoints with data that are made anew."""
    whole = ft.Checkpointer(folder / "whole", every=every, keep=None)
    trained(make(), whole, fuse=fuse)
    found = {}
    for at in whole.steps():
        shutil.copytree(folder / "whole", folder / str(at))
        copy = ft.Checkpointer(folder / str(at), every=NEVER)
        copy.rollback(at)
        found[at] = bits(trained(make(), copy, fuse=3))
    return found
