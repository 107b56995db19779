"""A training of which each process has a part of the data; see test_local.py.

python parts.py DIRECTORY     prints a line of JSON for each thing that was tried
"""

import json
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


def say(name: str, found: Any) -> None:
    sys.stdout.write(json.dumps({name: found}) + "\n")
    sys.stdout.flush()


def refused(name: str, *args: Any, by: Any = fit, **kwargs: Any) -> None:
    try:
        by(*args, **kwargs)
    except (ValueError, RuntimeError) as error:
        say(name, str(error))
    else:
        say(name, None)


def losses(name: str, make: Any) -> None:
    one, three = (fit(local(make()), epochs=2, fuse=k).history.steps["loss"] for k in (1, 3))
    say(name, [one.tolist(), three.tolist()])


def resumed(name: str, make: Any) -> None:
    """Leaves a run in mid-epoch, and goes on with all of it made anew."""
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
    say(name, [at, *both])


def undivided(trained: Any) -> None:
    """Evaluates and predicts 42 examples in batches of 8, 21 of them in each process."""

    def plain(params: Any, model_state: Any, batch: Any, *, rng: Any, training: bool) -> Any:
        return jnp.mean((batch @ params["w"] - 1) ** 2), ft.Aux(model_state)

    step, rows = ft.eval_step(plain), X[OWN::COUNT][:21]
    data = {"of each": local(ft.ArrayLoader(rows, 4)), "of all": ft.ArrayLoader(X[:42], 8)}
    for name, batches in data.items():
        loss = ft.evaluate(trained, step, batches, sharding=ROWS)["loss"]
        outputs = ft.predict(trained, lambda state, x: (state, x), batches, sharding=ROWS)
        say(f"undivided {name}", [loss, outputs.tolist()])


def stopped() -> None:
    """Stops the members of a population that is divided over the processes."""

    def step(x: Any, batch: Any) -> Any:
        return x + 1, {"loss": jnp.abs(x - 1)}  # the best state is 2

    members = jax.device_put(ft.population.stack(list(jnp.arange(4.0))), ROWS)
    hook = ft.population.EarlyStopping("loss", restore_best=True)
    over_all = ft.population.step(step)
    how: Any = {"sharding": jax.NamedSharding(MESH, jax.P()), "hooks": [hook], "verbose": 0}
    result, history = ft.fit(members, over_all, ft.NoData(1), epochs=9, **how)
    best = multihost_utils.process_allgather(result.states, tiled=True)
    say("stopped", [best.tolist(), hook.best_step.tolist(), len(history.epochs["loss"])])


def main() -> None:
    losses("MapDataset", part)
    losses("DataLoader", loader)
    losses("ArrayLoader", arrays)
    held_out = local(part().to_iter_dataset())
    trained, history = fit(local(part()), eval_data=held_out, eval_step=MEASURE)
    say("evaluated", [np.asarray(trained.params["w"]).tolist(), history.epochs["val_loss"].item()])
    outputs = ft.predict(trained, lambda state, x: (state, 2 * x), local(part()), sharding=ROWS)
    say("predicted", outputs.tolist())
    undivided(trained)
    stopped()
    for name, make in {"shuffled": shuffled, "DataLoader resumed": loader}.items():
        resumed(name, make)
    resumed("ArrayLoader resumed", arrays)
    with ft.Checkpointer(f"{FOLDER}/shuffled") as checkpoints:
        other = local(shuffled(seed=3 + OWN))
        refused("another part in the second", other, epochs=3, checkpointer=checkpoints)
    fewer = X[OWN::COUNT][: 24 - 8 * OWN]
    refused("fewer batches, of unknown length", local(part(rows=fewer).to_iter_dataset()))
    lengths = {"eval_data": local(part(rows=fewer)), "eval_step": MEASURE}
    refused("fewer batches to evaluate on", local(part()), **lengths)
    everywhere = jax.NamedSharding(MESH, jax.P())
    refused("the same part in both", part(), everywhere, by=ft.distributed.local)
    clock = ft.hooks.Evaluate(MEASURE, ft.ArrayLoader(X, 8), every=ft.every(seconds=1))
    refused("a clock", ft.ArrayLoader(X, 8), hooks=[clock])
    refused("other lengths", ft.ArrayLoader(X[: 48 - 8 * OWN], 8))
    refused("other epochs", ft.ArrayLoader(X, 8), epochs=2 + OWN)


if __name__ == "__main__":
    main()
