"""A training over several processes with four devices in all; see test_processes.py.

python processes.py RANK PROCESSES PORT DIRECTORY EPOCHS
"""

import os
import signal
import sys
import time
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
import optax

import functrain as ft
from tests.conftest import digest


def create(tx: optax.GradientTransformation) -> ft.TrainState:
    key = jax.random.key(0)
    params = {"w": jax.random.normal(key, (8, 16)), "v": jax.random.normal(key, (16, 1))}
    return ft.TrainState.create(params=params, tx=tx, rng=jax.random.key(1))


def loss_fn(params, model_state, batch, *, rng, training):  # type: ignore[no-untyped-def]
    x, y = batch
    hidden = jnp.tanh(x @ params["w"])
    hidden = hidden * jax.random.bernoulli(rng, 0.8, hidden.shape)
    return jnp.mean((hidden @ params["v"] - y) ** 2), ft.Aux(model_state)


def main(
    directory: str, epochs: int, fatal: int | None = None, hooks: Sequence[ft.hooks.Hook] = ()
) -> None:
    processes = int(os.environ.get("JAX_NUM_PROCESSES") or os.environ["SLURM_NTASKS"])
    os.environ["XLA_FLAGS"] = f"--xla_force_host_platform_device_count={4 // processes}"
    ft.distributed.initialize()
    mesh = ft.sharding.mesh({"data": 4})
    rows, everywhere = (jax.NamedSharding(mesh, jax.P(*axes)) for axes in (["data"], []))

    def digest_of(state: ft.TrainState) -> str:
        def whole(x: jax.Array) -> np.ndarray:
            x = jax.random.key_data(x) if jax.dtypes.issubdtype(x.dtype, jax.dtypes.prng_key) else x
            return np.asarray(jax.jit(lambda x: x, out_shardings=everywhere)(x))

        return digest(jax.tree.map(whole, state))

    def report(event: ft.events.Event) -> None:
        if isinstance(event, ft.events.ChunkEnd):
            print("step", event.step, flush=True)
            time.sleep(0.02)
            is_last = jax.process_index() == processes - 1
            if event.step == fatal and last is None and is_last:
                os.kill(os.getpid(), signal.SIGKILL)

    tx = optax.adam(0.01)
    state = ft.sharding.create(lambda: create(tx), mesh, ft.sharding.fsdp(min_size=1))
    x = np.random.default_rng(0).standard_normal((64, 8)).astype(np.float32)
    loader = ft.ArrayLoader((x, x[:, :1]), 8, shuffle=True, seed=3)
    checkpoints = ft.Checkpointer(directory, every=ft.every(steps=5), keep=2)
    if (last := checkpoints.latest()) is not None:
        print("begins", last, digest_of(checkpoints.restore(state).state))
        checkpoints.close()
    state, history = ft.fit(
        state,
        ft.train_step(loss_fn, tx),
        loader,
        epochs=epochs,
        checkpointer=checkpoints,
        sharding=rows,
        hooks=[report, ft.hooks.CSVLogger(f"{directory}.csv", every=ft.every(steps=3)), *hooks],
        fuse=2,
        verbose="lines",
    )
    # Two lines: another process may write into a line of more than the 4096 bytes of PIPE_BUF.
    print("ends", digest_of(state), flush=True)
    print("losses", [float(x) for x in history.steps["loss"]])


if __name__ == "__main__":
    main(sys.argv[1], *map(int, sys.argv[2:]))
