"""Runs that two processes share, which one of them stops or leaves; see test_stopping.py.

python stopping.py stops                   prints a line of JSON
python stopping.py exit:STATUS PROCESS     a process ends in the midst of a run
"""

# ruff: noqa: E402 - one function is registered at exit before jax registers its own

import atexit
import json
import sys
from typing import Any


def said_at_exit(what: str) -> None:
    atexit.register(lambda: sys.stdout.write(f"at exit: {what}\n") and sys.stdout.flush())


said_at_exit("registered before jax")

import jax
import jax.numpy as jnp
import numpy as np

import functrain as ft

said_at_exit("registered before initialize")
ft.distributed.initialize()
OWN, COUNT = jax.process_index(), jax.process_count()
MESH = ft.sharding.mesh({"data": -1})
DATA = np.arange(32, dtype=np.float32)


def step(total: Any, batch: Any) -> Any:
    return total + jnp.sum(batch), {"loss": total}


def fit(hook: Any, **more: Any) -> list[float]:
    """Fits for three epochs of eight steps, in programs of two; returns steps and the result."""
    how: dict[str, Any] = {"sharding": MESH, "epochs": 3, "fuse": 2, "verbose": 0, **more}
    state, history = ft.fit(jnp.zeros(()), step, ft.ArrayLoader(DATA, 4), hooks=[hook], **how)
    return [len(history.steps["loss"]), float(state)]


def stopping(process: int | None, step: int, kind: Any = ft.events.ChunkEnd) -> Any:
    """Returns a hook that stops at an event, in one process or in all."""

    def stop(event: Any) -> None:
        if process in (None, OWN) and isinstance(event, kind) and event.step >= step:
            event.stop()

    return stop


def by_hand(process: int) -> int:
    loader = ft.ArrayLoader(DATA, 4)
    for event in ft.run(jnp.zeros(()), step, loader, sharding=MESH, epochs=3, fuse=2):
        if process == OWN and event.step == 4:
            event.stop()
    return event.step


def stops() -> None:
    found: dict[str, Any] = {
        "all": fit(stopping(None, 10)),
        "the first": fit(stopping(0, 10)),
        "the second": fit(stopping(1, 10)),
        "the second at the end of an epoch": fit(stopping(1, 8, ft.events.EpochEnd)),
        "the second at the last step": fit(stopping(1, 24)),
        "each at another step": fit(stopping(None, 10 + 4 * OWN)),
        "by hand": by_hand(1),
        "alone": fit(stopping(1, 10), sharding=None),
    }
    sys.stdout.write(json.dumps(found) + "\n")


def leaving(status: int, process: int) -> Any:
    def leave(event: Any) -> None:
        if process == OWN and event.step == 10:
            sys.exit(status)

    return leave


if __name__ == "__main__":
    kind, _, status = sys.argv[1].partition(":")
    if kind == "stops":
        stops()
    else:
        fit(leaving(int(status), int(sys.argv[2])))
