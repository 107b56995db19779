"""Trainings of every kind that are to go on as if they had never ended.

Run as ``python -m tests.identities.trainings NAME FOLDER FUSE STEP`` one goes on from its last
checkpoint, and is killed when it has taken so many steps, or prints its hash when it is over.
"""

import functools
import os
import pathlib
import signal
import sys
from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

import functrain as ft

from ..conftest import digest

EPOCHS, PER_EPOCH = 3, 5
CLASSES = 4
RNG = np.random.default_rng(0)
IMAGES = RNG.normal(size=(40, 6, 6, 2)).astype(np.float32)
LABELS = RNG.integers(0, CLASSES, 40).astype(np.int32)
LOSS = optax.softmax_cross_entropy_with_integer_labels
METRICS = {"accuracy": ft.metrics.accuracy()}


class TwoStepsAndEpochs:
    """Due after every second step, and after every epoch."""

    def next_step(self, step: int) -> int:
        return step + 2 - step % 2

    def due(self, step: int, epoch: int | None, seconds: float) -> bool:
        return epoch is not None or step % 2 == 0


class Dropout(nn.Module):
    @nn.compact
    def __call__(self, x: Any, training: bool) -> Any:
        x = nn.relu(nn.Dense(16)(x.reshape(len(x), -1)))
        return nn.Dense(CLASSES)(nn.Dropout(0.4, deterministic=not training)(x))


class Convolutional(nn.Module):
    @nn.compact
    def __call__(self, x: Any, training: bool) -> Any:
        for features in (4, 8):
            x = nn.Conv(features, (3, 3))(x)
            x = nn.relu(nn.BatchNorm(use_running_average=not training)(x))
        return nn.Dense(CLASSES)(x.mean((1, 2)))


class Transformer(nn.Module):
    @nn.compact
    def __call__(self, x: Any, training: bool) -> Any:
        kind: dict[str, Any] = {"dtype": jnp.bfloat16, "param_dtype": jnp.bfloat16}
        x = nn.Dense(8, **kind)(x.reshape(len(x), 9, 8))
        attention = nn.MultiHeadAttention(2, dropout_rate=0.1, deterministic=not training, **kind)
        x = nn.LayerNorm(**kind)(x + attention(x))
        x = nn.LayerNorm(**kind)(x + nn.Dense(8, **kind)(nn.gelu(nn.Dense(16, **kind)(x))))
        return nn.Dense(CLASSES, **kind)(x.mean(1)).astype(jnp.float32)


class Stateful(nnx.Module):
    """Draws from streams of its own, which are a part of the state."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.first = nnx.Linear(72, 16, rngs=rngs)
        self.norm = nnx.BatchNorm(16, rngs=rngs)
        self.dropout = nnx.Dropout(0.3, rngs=rngs)
        self.last = nnx.Linear(16, CLASSES, rngs=rngs)

    def __call__(self, x: Any) -> Any:
        return self.last(self.dropout(self.norm(self.first(x.reshape(len(x), -1)))))


Parts = tuple[Any, Any, dict[str, Any]]


def loader(examples: int = 40) -> ft.ArrayLoader:
    """Five batches; of 36 examples the last is smaller, for which another program is compiled."""
    return ft.ArrayLoader((IMAGES[:examples], LABELS[:examples]), 8, shuffle=True, seed=1)


def of(model: ft.Model, tx: Any, rng: Any = 1, **more: Any) -> Parts:
    @jax.jit
    def create() -> ft.TrainState:
        params, model_state = model.init(jax.random.key(0), IMAGES[:1])
        key = None if rng is None else jax.random.key(rng)
        return ft.TrainState.create(params=params, model_state=model_state, tx=tx, rng=key)

    return create(), ft.train_step(ft.supervised(model, LOSS), tx, metrics=METRICS), more


@functools.cache
def mlp_with_dropout() -> Parts:
    model = ft.from_linen(Dropout())
    tx = optax.adamw(optax.warmup_cosine_decay_schedule(0.0, 1e-2, 3, EPOCHS * PER_EPOCH))
    return of(model, tx, eval_step=ft.eval_step(ft.supervised(model, LOSS), metrics=METRICS))


@functools.cache
def convnet_with_batch_norm() -> Parts:
    return of(ft.from_linen(Convolutional()), optax.sgd(0.05, momentum=0.9), rng=None)


@functools.cache
def bfloat16_transformer() -> Parts:
    return of(ft.from_linen(Transformer()), optax.chain(optax.clip(1.0), optax.adam(1e-3)))


@functools.cache
def nnx_module() -> Parts:
    return of(ft.from_nnx(Stateful(nnx.Rngs(0))), optax.lion(1e-3), rng=None)


@functools.cache
def gan_of_two_states() -> Parts:
    def dense(params: Any, x: Any) -> Any:
        return jnp.tanh(x @ params["in"]) @ params["out"]

    def player(seed: int, inputs: int, outputs: int, tx: Any, rng: Any) -> ft.TrainState:
        keys = jax.random.split(jax.random.key(seed))
        shapes = {"in": (inputs, 8), "out": (8, outputs)}
        params = {
            n: jax.random.normal(k, s) for (n, s), k in zip(shapes.items(), keys, strict=True)
        }
        return ft.TrainState.create(params=params, tx=tx, rng=rng)

    txs = {"judge": optax.adam(1e-2), "maker": optax.sgd(1e-2, momentum=0.9)}

    def judged(params: Any, model_state: Any, x: Any, is_real: Any, **_: Any) -> Any:
        loss = optax.sigmoid_binary_cross_entropy(dense(params, x), is_real)
        return loss.mean(), ft.Aux(model_state)

    def step(states: Any, batch: Any) -> Any:
        real = batch[0].reshape(len(batch[0]), -1)
        ones, zeros = jnp.ones((len(real), 1)), jnp.zeros((len(real), 1))

        def deceive(params: Any, model_state: Any, *, rng: Any, training: bool) -> Any:
            made = dense(params, jax.random.normal(rng, (len(real), 3)))
            loss, _ = judged(states["judge"].params, (), made, ones)
            return loss, ft.Aux(model_state, made)

        maker, made_loss, aux = ft.update(states["maker"], deceive, txs["maker"])
        both, is_real = jnp.concatenate([aux.outputs, real]), jnp.concatenate([zeros, ones])
        judge, loss, _ = ft.update(states["judge"], judged, txs["judge"], both, is_real)
        return {"judge": judge, "maker": maker}, {"judge": loss, "maker": made_loss}

    states = {
        "judge": player(0, 72, 1, txs["judge"], None),
        "maker": player(1, 3, 72, txs["maker"], jax.random.key(2)),
    }
    return states, step, {}


@functools.cache
def population_of_mlps() -> Parts:
    model = ft.from_linen(Dropout())
    tx = optax.inject_hyperparams(optax.adam)(learning_rate=1e-2)

    def make(key: Any) -> ft.TrainState:
        params, model_state = model.init(key, IMAGES[:1])
        return ft.TrainState.create(params=params, model_state=model_state, tx=tx, rng=key)

    rates = {"learning_rate": np.geomspace(1e-3, 1e-1, 4)}
    states = ft.population.create(make, jax.random.key(0), hyperparameters=rates)
    step = ft.train_step(ft.supervised(model, LOSS), tx, metrics=METRICS)
    return states, ft.population.step(step), {}


TRAININGS: dict[str, Callable[[], Parts]] = {
    f.__name__: f
    for f in (
        mlp_with_dropout,
        convnet_with_batch_norm,
        bfloat16_transformer,
        nnx_module,
        gan_of_two_states,
        population_of_mlps,
    )
}


def train(
    name: str, folder: pathlib.Path, fuse: int, checkpointer: Any = None, last: Any = None
) -> ft.FitResult[Any]:
    """Trains, or goes on, with everything that can go on.

    Args:
      name: Of the training.
      folder: For files of logs.
      fuse: Steps per program.
      checkpointer: A Checkpointer.
      last: The hook that comes after the others.
    """
    state, step, more = TRAININGS[name]()
    hooks: list[Any] = [
        ft.hooks.CSVLogger(folder / "epochs.csv"),
        ft.hooks.CSVLogger(folder / "steps.csv", every=ft.every(steps=3)),
    ]
    if eval_step := more.get("eval_step"):
        more = {"eval_step": eval_step, "eval_data": ft.ArrayLoader((IMAGES, LABELS), 16)}
        often = ft.hooks.Evaluate(eval_step, loader(), every=ft.every(steps=4), prefix="at_")
        patient = ft.hooks.EarlyStopping("val_loss", patience=EPOCHS + 1, restore_best=True)
        hooks = [*hooks, often, patient, ft.hooks.EarlyStopping("loss", patience=EPOCHS + 1)]
    return ft.fit(
        state,
        step,
        loader(36 if name == "gan_of_two_states" else 40),
        epochs=EPOCHS,
        checkpointer=checkpointer,
        hooks=[*hooks, *([] if last is None else [last])],
        fuse=fuse,
        verbose=0,
        **more,
    )


def bits(result: ft.FitResult[Any], folder: pathlib.Path) -> str:
    """A hash of the state, the history and the files of logs, all but seconds."""
    history = result.history
    epochs = {n: x for n, x in history.epochs.items() if n != "seconds"}
    files = [(folder / name).read_bytes() for name in ("epochs.csv", "steps.csv")]
    rows = [np.frombuffer(file, np.uint8) for file in files]
    first = np.int64(history.first_step)
    return digest((result.state, history.steps, epochs, history.within_epochs, first, rows))


def main(name: str, folder: pathlib.Path, fuse: int, killed_at: int) -> None:
    @ft.at(killed_at or 10**9)
    def kill(event: Any) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    checkpointer = ft.Checkpointer(folder / "checkpoints", every=TwoStepsAndEpochs())
    print(bits(train(name, folder, fuse, checkpointer, kill), folder))


if __name__ == "__main__":
    main(sys.argv[1], pathlib.Path(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4]))
