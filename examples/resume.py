"""A training run that is killed twice and resumed gives the same bits as an uninterrupted run.

The script starts itself as a separate process. SIGKILL, which a process cannot catch, ends that
process twice in mid-epoch, and each time the script runs the same command again. Then it trains
once without interruption, and compares both results bit for bit: the parameters, the optimizer
state, the random keys, the history and the log file.

    python examples/resume.py            # three epochs, about a minute on two CPU cores
    python examples/resume.py --quick    # about 20 seconds
"""

# %% Options. The script sets `--folder` and `--kill-at` itself when it starts the training process
from _example import arguments

args = arguments(
    __doc__,
    quick="3 200 digits",
    epochs=3,
    batch_size=64,
    every=(20, "steps between two checkpoints"),
    folder=("", "the folder of the run; set by the script itself"),
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


# %% The model. It has two parts that make exact resuming harder: BatchNorm, whose statistics must
# be restored, and dropout, whose random keys must be restored
class Net(nn.Module):
    @nn.compact
    def __call__(self, x, train):
        x = x.astype(jnp.float32) / 255
        for width in (8, 16):
            x = nn.Conv(width, (3, 3), strides=2, use_bias=False)(x)
            x = nn.relu(nn.BatchNorm(use_running_average=not train)(x))
        x = nn.Dropout(0.3, deterministic=not train)(x.reshape(len(x), -1))
        return nn.Dense(10)(x)


# %% Training. The `checkpointer` argument is all that resuming needs. `ft.fit` saves checkpoints to
# it, and restores the latest one when it starts
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


# %% The training process. It trains in `--folder`, and kills itself at the step `--kill-at`, as a
# preempted machine might
if args.folder:

    @ft.at(args.kill_at)
    def kill(event):
        print(f"killed at step {event.step}", flush=True)
        os.kill(os.getpid(), signal.SIGKILL)

    train(pathlib.Path(args.folder), kill)
    sys.exit()

# %% Three processes for one run. The first two are killed, and the third one finishes. The command
# differs only in `--kill-at`
resumed_folder, straight_folder = args.output / "resumed", args.output / "straight"
for folder in (resumed_folder, straight_folder):
    shutil.rmtree(folder, ignore_errors=True)
steps = args.epochs * ((3_200 if args.quick else 16_000) // args.batch_size)
kills = [steps // 3 - 5, 2 * steps // 3 - 7, 10**9]
for attempt, step in enumerate(kills, 1):
    print(f"process {attempt}:", flush=True)
    options = ["--folder", str(resumed_folder), "--kill-at", str(step)]
    process = subprocess.run([sys.executable, *sys.argv, *options], check=False)
    expected_code = 0 if step == kills[-1] else -signal.SIGKILL
    assert process.returncode == expected_code, process.returncode

# %% The uninterrupted run. Then `train` is called for the resumed run, too. That run has finished,
# so `ft.fit` takes no more steps and returns the state and history from its last checkpoint
print("without interruption:")
straight = train(straight_folder)
print("the resumed run, which has finished:")
resumed = train(resumed_folder)


# %% Comparison. The SHA-256 digests of both results must be equal. The `seconds` of the history are
# left out, since they are measured times
def sha(tree):
    digest = hashlib.sha256()
    for leaf in jax.tree.leaves(tree):
        if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
            leaf = jax.random.key_data(leaf)
        digest.update(np.asarray(leaf).tobytes())
    return digest.hexdigest()[:16]


def without_seconds(history):
    epochs = {name: x for name, x in history.epochs.items() if name != "seconds"}
    return [history.steps, epochs]


def log_sha(folder):
    return sha(np.fromfile(folder / "log.csv", np.uint8))


for name, a, b in (
    ("state", sha(straight.state), sha(resumed.state)),
    ("history", sha(without_seconds(straight.history)), sha(without_seconds(resumed.history))),
    ("log.csv", log_sha(straight_folder), log_sha(resumed_folder)),
):
    print(f"{name:8} uninterrupted {a}, killed twice {b}: {'equal' if a == b else 'NOT equal'}")

# %% Plot. The loss of both runs, and the steps at which the process was killed
figure = matplotlib.figure.Figure(figsize=(7, 4), layout="constrained")
panel = figure.subplots()
for result, style, label in ((straight, "-", "uninterrupted"), (resumed, "--", "killed twice")):
    loss = result.history.steps["loss"]
    smooth = np.convolve(loss, np.ones(10) / 10, mode="valid")
    panel.plot(np.arange(10, len(loss) + 1), smooth, style, lw=1.5, label=label)
for step in kills[:-1]:
    panel.axvline(step, color="#d1602a", lw=1, ls=":")
panel.set(xlabel="step", ylabel="loss, mean of 10 steps", yscale="log")
panel.legend()
figure.savefig(args.output / "resume.png", dpi=120)
print(f"wrote {args.output / 'resume.png'}")
