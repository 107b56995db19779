"""A program that is killed: lives that save as fast as they can, each a process of its own.

For each line that comes in, it begins one; all of them are forked from a process that has imported
everything and started nothing, so that a life costs no import.
"""

import os
import sys
import warnings
from typing import Any

import jax.numpy as jnp
import numpy as np

import functrain as ft

KEEP = 2


def state_of(step: int, version: int) -> dict[str, Any]:
    """A state in which every leaf says of which step it is, and which version of it."""
    number = 10 * step + version
    return {
        "jax": jnp.full((300, 100), number, jnp.int32),
        "numpy": np.full(20_000, number),
        "many": [np.full(3, number) for _ in range(10)],
    }


def loss_of(step: int) -> float:
    """Now better, now worse: the best is seldom among the newest."""
    return float("nan") if step % 5 == 0 else float(step * 7 % 11 + 1)


def live(directory: str) -> None:
    checkpoints = ft.Checkpointer(directory, keep=KEEP, monitor="loss")
    step = checkpoints.latest() or 0
    while True:
        step += 1
        for version in range(1 + step % 2):  # every other step is saved once more
            checkpoints.save(
                state_of(step, version),
                step,
                values={"loss": loss_of(step)},
                documents={"here": {"number": 10 * step + version, "x": np.full(2, step)}},
                wait=False,
            )
        if step % 3 == 0:
            checkpoints.wait()
            print(f"saved {step}", flush=True)


def main() -> None:
    warnings.simplefilter("ignore")  # jax warns of forks: it has started nothing here
    from orbax.checkpoint import v1  # noqa: F401

    for line in sys.stdin:
        life = os.fork()
        if life == 0:
            print(f"life {os.getpid()}", flush=True)
            live(line.strip())
        os.waitpid(life, 0)
        print("killed", flush=True)


if __name__ == "__main__":
    main()
