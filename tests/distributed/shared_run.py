"""Runs that two processes share, which one of them stops or leaves; see test_stopping.py.

python shared_run.py stops                  reports how it stops
python shared_run.py WAY PROCESS DIRECTORY  a process leaves a run that saves
"""

import sys
import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import functrain as ft
from tests.distributed.reports import report

ft.distributed.initialize()
PROCESS = jax.process_index()
MESH = ft.sharding.mesh({"data": -1})
LOADER = ft.ArrayLoader(np.arange(32, dtype=np.float32), 4)


def step(total: Any, batch: Any) -> Any:
    return total + jnp.sum(batch), {"loss": total}


def fit(hook: Any, **more: Any) -> list[float]:
    """Fits for three epochs of eight steps, in programs of two; returns steps and the result."""
    how: dict[str, Any] = {"sharding": MESH, "epochs": 3, "fuse": 2, "verbose": 0, **more}
    state, history = ft.fit(jnp.zeros(()), step, LOADER, hooks=[hook], **how)
    return [len(history.steps["loss"]), float(state)]


def stopping(process: int | None, step: int, kind: Any = ft.events.ChunkEnd) -> Any:
    """Returns a hook that stops at an event, in one process or in all."""

    def stop(event: Any) -> None:
        if process in (None, PROCESS) and isinstance(event, kind) and event.step >= step:
            event.stop()

    return stop


def loop(process: int, act: Any, **more: Any) -> int:
    """Runs three epochs; one process acts at step 4, and leaves the loop if that returns True."""
    run = ft.run(jnp.zeros(()), step, LOADER, sharding=MESH, epochs=3, fuse=2, **more)
    for event in run:
        if process == PROCESS and event.step == 4 and act(event):
            break
    return event.step


def stops() -> None:
    report("all", fit, stopping(None, 10))
    report("the first", fit, stopping(0, 10))
    report("the second", fit, stopping(1, 10))
    report("the second at the end of an epoch", fit, stopping(1, 8, ft.events.EpochEnd))
    report("the second at the last step", fit, stopping(1, 24))
    report("each at another step", fit, stopping(None, 10 + 4 * PROCESS))
    report("by hand", loop, 1, lambda event: event.stop())
    report("alone", fit, stopping(1, 10), sharding=None)


def leave(way: str, process: int, directory: str) -> None:
    checkpointer = ft.Checkpointer(directory, every=ft.every(steps=2))

    def act(event: Any) -> bool:
        if event.step < 10 or process != PROCESS:
            return False
        if way == "exception":
            raise ValueError("mine")
        if way == "exit":
            sys.exit(3)
        if way == "hang":
            time.sleep(1000)
        return True

    if way == "break":
        loop(process, lambda event: True, checkpointer=checkpointer)
        time.sleep(1000)
    watchdog = ft.hooks.Watchdog(2)
    hooks = [watchdog, act] if way == "hang" else [act]
    ft.fit(
        jnp.zeros(()),
        step,
        LOADER,
        hooks=hooks,
        epochs=200,
        sharding=MESH,
        checkpointer=checkpointer,
        verbose=0,
    )


if __name__ == "__main__":
    stops() if sys.argv[1] == "stops" else leave(sys.argv[1], int(sys.argv[2]), sys.argv[3])
