"""A small training that the tests of hooks share: 20 steps an epoch, the last one smaller."""

import contextlib
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

import functrain as ft

X = np.random.default_rng(0).normal(size=(79, 3)).astype(np.float32)
Y = X @ np.array([1.0, -2.0, 0.5], np.float32)
LOADER = ft.ArrayLoader((X, Y), 4, shuffle=True, seed=1)
SCHEDULE = optax.linear_schedule(0.1, 0.01, 60)
TX = optax.adam(SCHEDULE)


def loss_fn(params: Any, model_state: Any, batch: Any, *, rng: Any, training: bool) -> Any:
    x, y = batch
    return jnp.mean((x @ params["w"] - y) ** 2), ft.Aux(model_state)


STEP, EVAL = ft.train_step(loss_fn, TX, learning_rate=SCHEDULE), ft.eval_step(loss_fn)


def start() -> Any:
    return ft.TrainState.create(params={"w": jnp.zeros(3)}, tx=TX)


def fit(*hooks: Any, state: Any = None, **how: Any) -> Any:
    how = {"epochs": 3, "fuse": 8, "verbose": 0, **how}
    return ft.fit(state or start(), STEP, LOADER, hooks=hooks, **how)


class Scripted:
    """Puts a given value into each epoch."""

    def __init__(self, *values: float, name: str = "score") -> None:
        self.values, self.name = iter(values), name

    def __call__(self, event: Any) -> None:
        if isinstance(event, ft.events.EpochEnd):
            event.values[self.name] = next(self.values)


class PowerCutError(BaseException):
    """What ends a life."""


def power_cut(step: int) -> Any:
    @ft.at(step)
    def cut(event: Any) -> None:
        raise PowerCutError

    return cut


def lives(make: Any, folder: Any, cuts: list[int], every: int = 15, **how: Any) -> Any:
    """Trains in several lives, each of which ends at a step, and the last at the end.

    Args:
      make: Returns the hooks of a life.
      folder: Of the checkpoints.
      cuts: Where each life ends.
      every: How often it saves.
      **how: For `fit`.
    """
    for step in [*cuts, None]:
        checkpointer = ft.Checkpointer(folder, every=ft.every(steps=every))
        cut = [] if step is None else [power_cut(step)]
        with contextlib.suppress(PowerCutError):
            result = fit(*make(), *cut, checkpointer=checkpointer, **how)
            assert step is None
    return jax.device_get(result.state), result.history
