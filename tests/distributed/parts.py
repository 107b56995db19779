"""A training of which each process has a part of the data; see test_local.py.

python parts.py DIRECTORY     reports each thing that was tried
"""

import os
import sys
from typing import Any

os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=2"

import grain
import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.experimental import multihost_utils

import functrain as ft
from tests.distributed.reports import report

ft.distributed.initialize()
MESH = ft.sharding.mesh({"data": -1})
ROWS = jax.NamedSharding(MESH, jax.P("data"))
OWN, COUNT = jax.process_index(), jax.process_count()
FOLDER = sys.argv[1]
X = np.random.default_rng(0).normal(size=(48, 3)).astype(np.float32)
TX = optax.sgd(0.1)


def loss_fn(params: Any, model_state: Any, batch: Any, *, rng: Any, training: bool) -> Any:
    batch = jax.lax.with_sharding_constraint(batch, ROWS)  # of a part, it would not divide
    return jnp.mean((batch @ params["w"] - 1) ** 2), ft.Aux(model_state)


STEP, MEASURE = ft.train_step(loss_fn, TX), ft.eval_step(loss_fn)


def state() -> ft.TrainState:
    return ft.TrainState.create(params={"w": jnp.zeros(3)}, tx=TX)


def part(size: int = 4, rows: Any = X[OWN::COUNT]) -> Any:
    return grain.MapDataset.source(rows).batch(size)


def shuffled(seed: int = 3) -> Any:
    return grain.MapDataset.source(X)[OWN::COUNT].seed(seed).shuffle().batch(4)


def loader() -> Any:
    sharding = grain.sharding.ShardByJaxProcess()
    sampler = grain.samplers.IndexSampler(
        len(X), shuffle=True, seed=1, num_epochs=1, shard_options=sharding
    )
    return grain.DataLoader(
        data_source=X, sampler=sampler, operations=[grain.transforms.Batch(4)], worker_count=0
    )


def arrays(rows: Any = X[OWN::COUNT]) -> ft.ArrayLoader:
    return ft.ArrayLoader(rows, 4, shuffle=True, seed=OWN)


def fit(data: Any, **more: Any) -> ft.FitResult:
    how: dict[str, Any] = {"sharding": ROWS, "verbose": 0, **more}
    return ft.fit(state(), STEP, data, **how)


def local(data: Any) -> Any:
    return ft.distributed.local(data, ROWS)


def losses(make: Any) -> list[list[float]]:
    one, three = (fit(local(make()), epochs=2, fuse=k).history.steps["loss"] for k in (1, 3))
    return [one.tolist(), three.tolist()]


def resumed(name: str, make: Any) -> list[Any]:
    """Leaves a run in mid-epoch, and resumes it with all of it made anew."""
    straight = fit(local(make()), epochs=2)
    place = f"{FOLDER}/{name}"
    how: Any = {"epochs": 2, "sharding": ROWS}
    with ft.Checkpointer(place, every=ft.every(steps=4)) as checkpoints:
        run = ft.run(state(), STEP, local(make()), checkpointer=checkpoints, fuse=2, **how)
        for event in run:
            if event.step >= 10:  # epochs have six steps: within the second
                break
        run.close()
    with ft.Checkpointer(place) as checkpoints:
        at = checkpoints.latest()
        again = fit(local(make()), epochs=2, checkpointer=checkpoints)
    both = (np.asarray(r.state.params["w"]).tolist() for r in (straight, again))
    return [at, *both]


def evaluated() -> list[Any]:
    held_out = local(part().to_iter_dataset())
    trained, history = fit(local(part()), eval_data=held_out, eval_step=MEASURE)
    return [np.asarray(trained.params["w"]).tolist(), history.epochs["val_loss"].item()]


def predicted() -> list[Any]:
    outputs = ft.predict(state(), lambda state, x: (state, 2 * x), local(part()), sharding=ROWS)
    return outputs.tolist()  # type: ignore[no-any-return]


def undivided(make: Any, rows: Any, size: int) -> list[Any]:
    """Evaluates and predicts 42 examples in batches of 8, 21 of them in each process."""

    def plain(params: Any, model_state: Any, batch: Any, *, rng: Any, training: bool) -> Any:
        return jnp.mean((batch @ params["w"] - 1) ** 2), ft.Aux(model_state)

    batches = make(ft.ArrayLoader(rows, size))
    trained = state().replace(params={"w": jnp.arange(3.0)})
    loss = ft.evaluate(trained, ft.eval_step(plain), batches, sharding=ROWS)["loss"]
    outputs = ft.predict(trained, lambda state, x: (state, x), batches, sharding=ROWS)
    return [loss, outputs.tolist()]


def stopped() -> list[Any]:
    """Stops the members of a population that is divided over the processes."""

    def step(x: Any, batch: Any) -> Any:
        return x + 1, {"loss": jnp.abs(x - 1)}  # the best state is 2

    members = jax.device_put(ft.population.stack(list(jnp.arange(4.0))), ROWS)
    hook = ft.population.EarlyStopping("loss", restore_best=True)
    over_all = ft.population.step(step)
    how: Any = {"sharding": jax.NamedSharding(MESH, jax.P()), "hooks": [hook], "verbose": 0}
    result, history = ft.fit(members, over_all, ft.NoData(1), epochs=9, **how)
    best = multihost_utils.process_allgather(result.states, tiled=True)
    return [best.tolist(), hook.best_step.tolist(), len(history.epochs["loss"])]


def another_part() -> None:
    """Resumes a run with other data in the second process."""
    with ft.Checkpointer(f"{FOLDER}/shuffled") as checkpoints:
        fit(local(shuffled(seed=3 + OWN)), epochs=3, checkpointer=checkpoints)


def main() -> None:
    for name, make in {"MapDataset": part, "DataLoader": loader, "ArrayLoader": arrays}.items():
        report(name, losses, make)
    report("evaluated", evaluated)
    report("predicted", predicted)
    report("undivided of each", undivided, local, X[OWN::COUNT][:21], 4)
    report("undivided of all", undivided, lambda data: data, X[:42], 8)
    report("stopped", stopped)
    report("shuffled", resumed, "shuffled", shuffled)
    report("ArrayLoader resumed", resumed, "arrays", arrays)
    report("another part in the second", another_part)
    fewer = X[OWN::COUNT][: 24 - 8 * OWN]
    report("fewer batches, of unknown length", fit, local(part(rows=fewer).to_iter_dataset()))
    lengths = {"eval_data": local(part(rows=fewer)), "eval_step": MEASURE}
    report("fewer batches to evaluate on", fit, local(part()), **lengths)
    report("the same part in both", ft.distributed.local, part(), jax.NamedSharding(MESH, jax.P()))
    clock = ft.hooks.Evaluate(MEASURE, ft.ArrayLoader(X, 8), every=ft.every(seconds=1))
    report("a clock", fit, ft.ArrayLoader(X, 8), hooks=[clock])
    report("other lengths", fit, ft.ArrayLoader(X[: 48 - 8 * OWN], 8))
    report("other epochs", fit, ft.ArrayLoader(X, 8), epochs=2 + OWN)


if __name__ == "__main__":
    main()
