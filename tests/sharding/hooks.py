"""Hooks on eight CPU devices; see test_hooks.py.

python hooks.py DIRECTORY     prints a line of JSON for each form
"""

import json
import os
import pathlib
import sys
from typing import Any

os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=8"

import jax
import jax.numpy as jnp
import numpy as np
import optax

import functrain as ft

X = np.random.default_rng(0).normal(size=(64, 16)).astype(np.float32)
TX = optax.inject_hyperparams(optax.adam)(learning_rate=0.05)
BOTH = ft.sharding.rules({"w": jax.P("data", "model"), "**": ft.sharding.replicated})
FORMS: dict[str, Any] = {
    "one device": None,
    "fsdp x tensor": ({"data": 4, "model": 2}, BOTH, False),
    "explicit": ({"data": 8}, ft.sharding.replicated, True),
}


def loss_fn(params: Any, model_state: Any, batch: Any, *, rng: Any, training: bool) -> Any:
    outputs = (batch @ params["w"]).sum(1) + params["b"]
    return jnp.mean((outputs - 1) ** 2), ft.Aux(model_state, outputs)


STEP, MEASURE = ft.train_step(loss_fn, TX), ft.eval_step(loss_fn)


def make() -> ft.TrainState:
    params = {"w": jnp.ones((16, 8)) / 8, "b": jnp.zeros(())}
    return ft.TrainState.create(params=params, tx=TX)


class Seen:
    """A hook of one's own: a `Hook`."""

    when = ft.every(steps=3)

    def __init__(self) -> None:
        self.steps: list[int] = []

    def __call__(self, event: ft.events.Event, /) -> None:
        self.steps.append(event.step)


def numbers(path: pathlib.Path, steps: int = 16) -> list[float]:
    """The losses that a file of lines has."""
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    return [line["loss"] for line in lines if "loss" in line][:steps]


def fit(form: str, folder: pathlib.Path) -> dict[str, Any]:
    how, state = placed(form)
    # The first value is the best.
    best = ft.hooks.EarlyStopping("val_loss", patience=0, min_delta=1e9, restore_best=True)
    made = {
        "Evaluate": ft.hooks.Evaluate(MEASURE, ft.ArrayLoader(X, 32), **how),
        "EarlyStopping": best,
        "ReduceLROnPlateau": ft.hooks.ReduceLROnPlateau(patience=1, min_delta=1e9),
        "Sample": ft.hooks.Sample(
            lambda state: {"w": np.asarray(state.params["w"])}, directory=folder / "samples"
        ),
        "TerminateOnNaN": ft.hooks.TerminateOnNaN(),
        "Throughput": ft.hooks.Throughput(flops_per_step=1e6),
        "Watchdog": ft.hooks.Watchdog(600),
        "CSVLogger": ft.hooks.CSVLogger(folder / "run.csv", every=ft.every(steps=1)),
        "JSONLines": ft.hooks.JSONLines(folder / "run.jsonl", every=1),
        "Hook": (seen := Seen()),
    }
    before = jax.tree.map(lambda x: x.sharding, state)
    checkpoints = ft.Checkpointer(folder / "kept", every=ft.every(steps=5))
    result, history = ft.fit(
        state,
        STEP,
        ft.ArrayLoader(X, 8),
        epochs=3,
        hooks=list(made.values()),
        checkpointer=checkpoints,
        fuse=4,
        verbose=0,
        **how,
    )
    rows = (folder / "run.csv").read_text().splitlines()
    column = rows[0].split(",").index("loss")
    return {
        "stays": jax.tree.all(jax.tree.map(is_where, result, before)),
        "val_loss": history.epochs["val_loss"].tolist(),
        "rates": history.epochs["learning_rate"].tolist(),
        "best_step": best.best_step,
        "step": int(result.step),
        "w": np.asarray(result.params["w"]).tolist(),
        "samples": sorted(path.name for path in (folder / "samples").iterdir()),
        "csv": [float(row.split(",")[column]) for row in rows[1:] if row.split(",")[column]],
        "json": numbers(folder / "run.jsonl"),
        "seen": seen.steps,
        "kept": checkpoints.steps(),
    }


def is_where(x: jax.Array, sharding: Any) -> bool:
    return bool(x.sharding.is_equivalent_to(sharding, x.ndim))


def placed(form: str) -> tuple[dict[str, Any], ft.TrainState]:
    if FORMS[form] is None:
        return {}, make()
    axes, rule, explicit = FORMS[form]
    mesh = ft.sharding.mesh(axes, explicit=explicit)
    how = {"sharding": jax.NamedSharding(mesh, jax.P("data"))}
    return how, ft.sharding.create(make, mesh, rule)


if __name__ == "__main__":
    for form in FORMS:
        folder = pathlib.Path(sys.argv[1]) / form
        print(json.dumps({form: fit(form, folder)}), flush=True)
