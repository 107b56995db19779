"""A training that is killed twice, goes on, and ends where one ends that was left alone.

The script starts itself as a process of its own, which SIGKILL ends twice in mid-epoch: nothing can
prepare for that. Each time the same command is run again. Then the same training runs in one go,
and the bits of both are compared: of parameters, optimizer, randomness, history and log file.

    python examples/resume.py            # three epochs, a minute on two CPU cores
    python examples/resume.py --quick    # some 20 seconds
"""

# %% The options
from _example import arguments

args = arguments(
    __doc__,
    quick="3 200 digits",
    epochs=3,
    batch_size=64,
    every=(20, "steps between two checkpoints"),
    folder=("", "where the training is; made by the script itself"),
    kill_at=(10**9, "the step at which the process kills itself; set by the script itself"),
)

import hashlib
import os
import pathlib
import shutil
import signal
import subprocess
import sys

import flax.linen as nn
import functrain as ft
import jax
import jax.numpy as jnp
import matplotlib.figure
import numpy as np
import optax


# %% A convnet with what makes resuming hard: BatchNorm's statistics, and dropout
class Net(nn.Module):
    @nn.compact
    def __call__(self, x, train):
        x = x.astype(jnp.float32) / 255
        for width in (8, 16):
            x = nn.Conv(width, (3, 3), strides=2, use_bias=False)(x)
            x = nn.relu(nn.BatchNorm(use_running_average=not train)(x))
        x = nn.Dropout(0.3, deterministic=not train)(x.reshape(len(x), -1))
        return nn.Dense(10)(x)


# %% The training. All there is to resuming is the checkpointer
def train(folder, *more_hooks):
    with np.load(args.data / "mnist.npz") as file:
        x, y = file["x_train"][..., None], file["y_train"].astype(np.int32)
    x, y = (part[: 3_200 if args.quick else 16_000] for part in (x, y))
    loader = ft.ArrayLoader((x, y), args.batch_size, shuffle=True, seed=args.seed)
    model = ft.from_linen(Net())
    params, model_state = model.init(jax.random.key(args.seed), x[:1])
    tx = optax.adamw(optax.cosine_decay_schedule(2e-3, args.epochs * len(loader)))
    key = jax.random.key(args.seed + 1)
    loss_fn = ft.supervised(model, optax.softmax_cross_entropy_with_integer_labels)
    metrics = {"accuracy": ft.metrics.accuracy()}
    return ft.fit(
        ft.TrainState.create(params=params, model_state=model_state, tx=tx, rng=key),
        ft.train_step(loss_fn, tx, metrics=metrics),
        loader,
        epochs=args.epochs,
        eval_data=ft.ArrayLoader((x[:500], y[:500]), 100),
        eval_step=ft.eval_step(loss_fn, metrics=metrics),
        hooks=[ft.hooks.CSVLogger(folder / "log.csv", every=ft.every(steps=10)), *more_hooks],
        checkpointer=ft.Checkpointer(folder / "checkpoints", every=ft.every(steps=args.every)),
        verbose="lines",
    )


# %% One life of it: the process kills itself at a step, as the machine's owner might
if args.folder:

    @ft.at(args.kill_at)
    def kill(event):
        print(f"killed at step {event.step}", flush=True)
        os.kill(os.getpid(), signal.SIGKILL)

    train(pathlib.Path(args.folder), kill)
    sys.exit()

# %% Three lives of one training: the command is the same each time, but for when it is killed
broken, straight = args.output / "broken", args.output / "straight"
for folder in (broken, straight):
    shutil.rmtree(folder, ignore_errors=True)
per_epoch = (3_200 if args.quick else 16_000) // args.batch_size
kills = [per_epoch - 5, 2 * per_epoch - 7, 10**9]
for life, step in enumerate(kills, 1):
    print(f"life {life}:", flush=True)
    options = ["--folder", str(broken), "--kill-at", str(step)]
    done = subprocess.run([sys.executable, *sys.argv, *options], check=False)
    assert done.returncode == (0 if step == kills[-1] else -signal.SIGKILL), done.returncode

# %% The same training in one go; and the broken one, which is over: it gives back what came of it
print("in one go:")
whole = train(straight)
print("the broken one once more:")
pieces = train(broken)


# %% The bits of both
def sha(tree):
    found = hashlib.sha256()
    for leaf in jax.tree.leaves(tree):
        key = jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)
        found.update(np.asarray(jax.random.key_data(leaf) if key else leaf).tobytes())
    return found.hexdigest()[:16]


def without_seconds(history):
    epochs = {name: x for name, x in history.epochs.items() if name != "seconds"}
    return [history.steps, epochs]


for name, a, b in (
    ("state", sha(whole.state), sha(pieces.state)),
    ("history", sha(without_seconds(whole.history)), sha(without_seconds(pieces.history))),
    ("log.csv", *(sha(np.fromfile(f / "log.csv", np.uint8)) for f in (straight, broken))),
):
    print(f"{name:8} in one go {a}, killed twice {b}: {'equal' if a == b else 'NOT equal'}")

# %% A picture: the loss of both, and where the process died
figure = matplotlib.figure.Figure(figsize=(7, 4), layout="constrained")
panel = figure.subplots()
for result, style, label in ((whole, "-", "in one go"), (pieces, "--", "killed twice")):
    loss = result.history.steps["loss"]
    smooth = np.convolve(loss, np.ones(10) / 10, mode="valid")
    panel.plot(np.arange(10, len(loss) + 1), smooth, style, lw=1.5, label=label)
for step in kills[:-1]:
    panel.axvline(step, color="#d1602a", lw=1, ls=":")
panel.set(xlabel="step", ylabel="loss, mean of 10 steps", yscale="log")
panel.legend()
figure.savefig(args.output / "resume.png", dpi=120)
print(f"wrote {args.output / 'resume.png'}")
