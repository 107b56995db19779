"""A training whose devices become fewer; see test_lost_mesh.py.

python lost.py DIRECTORY DEVICES     DEVICES in each process
"""

import os
import sys
from typing import Any

os.environ["XLA_FLAGS"] = f"--xla_force_host_platform_device_count={sys.argv[2]}"

import jax
import jax.numpy as jnp
import numpy as np
import optax

import functrain as ft
from tests.distributed.reports import report

ft.distributed.initialize()
TX = optax.adam(0.1)
X = np.random.default_rng(0).normal(size=(32, 8)).astype(np.float32)


def loss_fn(params: Any, model_state: Any, batch: Any, *, rng: Any, training: bool) -> Any:
    return jnp.mean((batch @ params["w"] @ params["v"] - 1) ** 2), ft.Aux(model_state)


def make() -> ft.TrainState:
    params = {"w": jnp.ones((8, 16)), "v": jnp.ones((16, 1))}
    return ft.TrainState.create(params=params, tx=TX)


def train(axes: dict[str, int], rule: ft.sharding.Rule, epochs: int) -> list[float]:
    """Goes on from the last checkpoint, if there is one; returns the losses from the beginning."""
    mesh = ft.sharding.mesh(axes)
    state = ft.sharding.create(make, mesh, rule)
    how: dict[str, Any] = {"epochs": epochs, "sharding": jax.NamedSharding(mesh, jax.P("data"))}
    with ft.Checkpointer(sys.argv[1]) as checkpointer:
        # The first epoch is the best.
        stop = ft.hooks.EarlyStopping("loss", patience=99, min_delta=1e9, restore_best=True)
        how |= {"checkpointer": checkpointer, "hooks": [stop], "verbose": 0}
        state, history = ft.fit(state, ft.train_step(loss_fn, TX), ft.ArrayLoader(X, 8), **how)
    assert len(state.params["w"].sharding.mesh.axis_names) == len(axes)
    assert int(state.step) == 4, "the best, which the other mesh had"
    return history.steps["loss"].tolist()  # type: ignore[no-any-return]


def alone() -> None:
    """The same, by somebody who has forgotten the mesh."""
    with ft.Checkpointer(sys.argv[1]) as checkpointer:
        how: dict[str, Any] = {"epochs": 3, "checkpointer": checkpointer, "verbose": 0}
        ft.fit(make(), ft.train_step(loss_fn, TX), ft.ArrayLoader(X, 8), **how)


def main() -> None:
    both = ft.sharding.rules({"w": jax.P("data", "model"), "**": ft.sharding.replicated})
    if jax.device_count() == 4:
        report("four", train, {"data": 2, "model": 2}, both, 2)
        return
    report("the axes of before", train, {"data": 2, "model": 2}, both, 3)
    report("the rule of before", train, {"data": 2}, both, 3)
    report("no mesh", alone)
    report("another mesh", train, {"data": 2}, ft.sharding.fsdp(min_size=1), 3)


if __name__ == "__main__":
    main()
