"""A run of two processes, which one of them leaves; see test_leaving.py.

python leaving.py WAY PROCESS [DIRECTORY]     DIRECTORY for checkpoints
"""

import os
import sys
import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import functrain as ft

WAY, LEAVER, *PLACE = sys.argv[1:]
ft.distributed.initialize()
MESH = ft.sharding.mesh({"data": -1})


def step(total: Any, batch: Any) -> Any:
    return total + jnp.sum(batch), {"loss": total}


def leave() -> None:
    print("leaves", time.monotonic(), flush=True)
    if WAY == "exception":
        raise ValueError("mine")
    if WAY.startswith("exit"):
        sys.exit(int(WAY.removeprefix("exit")))
    if WAY == "kill":
        os.kill(os.getpid(), 9)
    if WAY == "sleep":
        time.sleep(1000)


def main() -> None:
    checkpointer = ft.Checkpointer(PLACE[0], every=ft.every(steps=20)) if PLACE else None
    loader = ft.ArrayLoader(np.arange(64, dtype=np.float32), 4)
    how: dict[str, Any] = {"epochs": 200, "sharding": MESH, "checkpointer": checkpointer}
    is_leaver = jax.process_index() == int(LEAVER)
    if WAY == "before" and is_leaver:
        print("leaves", time.monotonic(), flush=True)
        return

    def hook(event: Any) -> None:
        if is_leaver and event.step >= 60:
            leave()

    if WAY in ("break", "continue"):
        for event in ft.run(jnp.zeros(()), step, loader, **how):
            if is_leaver and event.step >= 60:
                leave()
                break
        if WAY == "continue":
            time.sleep(1000)
    else:
        watchdog = [ft.hooks.Watchdog(3)] if WAY == "sleep" else []
        ft.fit(jnp.zeros(()), step, loader, hooks=[hook, *watchdog], verbose=0, **how)


if __name__ == "__main__":
    main()
