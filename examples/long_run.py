"""A run for a week: a training in two processes that goes on by itself whatever happens to it.

Everything that a long run needs is in the function `train`. Then the script breaks the run: it
damages some batches, kills a process, lets another one hang, and sends the signal by which a
scheduler announces the end of a job. Nobody is there to help, and at the end the run equals one
that nothing happened to, bit for bit.

    python examples/long_run.py            # about three minutes on two CPU cores
    python examples/long_run.py --quick    # half of that
"""

# %% Options. The script sets `--folder` and `--fail` itself when it starts a run
from _example import arguments

args = arguments(
    __doc__,
    quick="200 steps",
    batch_size=64,
    folder=("", "the folder of the run; set by the script itself"),
    fail=("", "the failures of the run; set by the script itself"),
)

import json
import os
import pathlib
import shutil
import signal
import subprocess
import sys
import time

import flax.linen as nn
import functrain as ft
import jax
import jax.numpy as jnp
import matplotlib.figure
import numpy as np
import optax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

STEPS = 200 if args.quick else 800


# %% The model
class Net(nn.Module):
    @nn.compact
    def __call__(self, x, train):
        for width in (8, 16):
            x = nn.relu(nn.Conv(width, (3, 3), strides=2)(x))
        x = nn.Dropout(0.3, deterministic=not train)(x.reshape(len(x), -1))
        return nn.Dense(10)(x)


# %% The data. The pixels of four batches in a row are 100 times as large as they should be, as if a
# part of a week's data had been damaged
BAD = range(STEPS // 2, STEPS // 2 + 4)


def batches():
    with np.load(args.data / "mnist.npz") as file:
        x, y = file["x_train"][..., None] / np.float32(255), file["y_train"].astype(np.int32)
    x, y = (part[: STEPS * args.batch_size] for part in (x, y))
    x[BAD.start * args.batch_size : BAD.stop * args.batch_size] *= 100
    return ft.ArrayLoader((x, y), args.batch_size, drop_remainder=True)


# %% Failures, for this script only. Each happens once: a file tells the next attempt that it has
# happened already
def happens(name):
    path = pathlib.Path(args.folder, f"{name}.happened")
    is_first = name in args.fail.split(",") and not path.exists()
    if is_first:
        path.touch()
    return is_first


@ft.at(STEPS // 4)
def kill(event):
    if jax.process_index() == 1 and happens("kill"):
        os.kill(os.getpid(), signal.SIGKILL)


@ft.at(STEPS // 2 + 20)
def hang(event):
    if jax.process_index() == 0 and happens("hang"):
        while True:
            time.sleep(1)


@ft.at(STEPS * 3 // 4)
def preempt(event):
    if jax.process_index() == 1 and happens("preemption"):
        os.kill(os.getpid(), signal.SIGTERM)


# %% The run. The line with `skip_spikes` leaves the damaged batches out: their losses are far above
# those of the last 128 steps. `Watchdog` ends a process that waits for another one; its time must
# be longer than the longest compilation, evaluation and save, so half an hour would do for a large
# model. `Goodput` says what the time was spent on. For a real run, save by the clock with
# `every=ft.every(minutes=10)`, to a directory or a URL that all hosts can reach, and log to the
# tracker that you have
def train(folder):
    ft.distributed.initialize()
    model, data = ft.from_linen(Net()), batches()
    schedule = optax.warmup_cosine_decay_schedule(0, 2e-3, 20, STEPS)
    tx = ft.tx.skip_spikes(optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(schedule)))

    def make():
        params, model_state = model.init(jax.random.key(args.seed), jnp.zeros((1, 28, 28, 1)))
        key = jax.random.key(args.seed + 1)
        return ft.TrainState.create(params=params, model_state=model_state, tx=tx, rng=key)

    mesh = ft.sharding.mesh({"data": -1})
    loss_fn = ft.supervised(model, optax.softmax_cross_entropy_with_integer_labels)
    return ft.fit(
        ft.sharding.create(make, mesh, ft.sharding.fsdp(min_size=1_000)),
        ft.train_step(loss_fn, tx, learning_rate=schedule),
        data,
        hooks=[
            ft.hooks.TerminateOnNaN(after=100),
            ft.hooks.Throughput(every=100),
            ft.hooks.Goodput(),
            ft.hooks.Watchdog(30),
            ft.hooks.TensorBoard(folder / "log"),
            ft.hooks.CSVLogger(folder / "log.csv", every=ft.every(steps=50)),
            kill,
            hang,
            preempt,
        ],
        sharding=NamedSharding(mesh, P("data")),
        checkpointer=ft.Checkpointer(folder / "checkpoints", every=STEPS // 16, keep=3),
        verbose="lines",
    )


# %% A process of the run. The first one writes what the script compares
if args.folder:
    folder = pathlib.Path(args.folder)
    state, history = train(folder)
    norm = float(optax.global_norm(state.params)).hex()
    results = {"norm": norm, **{name: x.tolist() for name, x in history.steps.items()}}
    if jax.process_index() == 0:
        (folder / "results.json").write_text(json.dumps(results))
    sys.exit()


# %% A supervisor. `functrain.launch` starts both processes, and starts them again after a failure.
# It ends with status 143 when the run was saved because of SIGTERM. A scheduler then queues the job
# again, and here it is a loop that does so. All that the processes print is in `printed.txt`, with
# the stacks of `Watchdog`, which show that the first process hangs in `hang`, and the second one
# waits for it
SHOWN = "functrain.launch", "functrain.hooks", "resuming", "epoch", "goodput"


def supervise(name, fail=""):
    folder = args.output / name
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    launcher = [sys.executable, "-m", "functrain.launch", "-n", "2"]
    command = [*launcher, *sys.argv, "--folder", str(folder), "--fail", fail]
    status = 143
    while status == 143:
        done = subprocess.run(
            command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False
        )
        with (folder / "printed.txt").open("a") as printed:
            printed.write(done.stdout)
        print(*(line for line in done.stdout.splitlines() if line.startswith(SHOWN)), sep="\n")
        status = done.returncode
        print(f"status {status}", flush=True)
    assert status == 0, folder / "printed.txt"
    return json.loads((folder / "results.json").read_text())


print("three failures:", flush=True)
broken = supervise("broken", "kill,hang,preemption")
print("no failure:", flush=True)
straight = supervise("straight")

# %% Comparison. All losses, all learning rates and the norm of the parameters must be equal, bit
# for bit. The damaged batches were skipped in both
equal = {name: broken[name] == straight[name] for name in straight}
print(f"equal: {', '.join(name for name in equal if equal[name])}")
assert all(equal.values()), equal
print(f"skipped batches: {broken['skipped'][-1]} of {STEPS}")

# %% Plot. The loss of both runs, and the steps at which something happened
figure = matplotlib.figure.Figure(figsize=(7, 4), layout="constrained")
panel = figure.subplots()
steps = range(1, STEPS + 1)
panel.plot(steps, straight["loss"], color="#b8cfe5", lw=3, label="no failure")
panel.plot(steps, broken["loss"], color="#1b3a5c", lw=0.8, label="three failures")
for step, name in (
    (STEPS // 4, "killed"),
    (BAD.start, "bad data"),
    (STEPS // 2 + 20, "hung"),
    (STEPS * 3 // 4, "SIGTERM"),
):
    panel.axvline(step, color="#d1602a", lw=1, ls=":")
    panel.annotate(name, (step, 0.02), xycoords=("data", "axes fraction"), rotation=90, ha="right")
panel.set(xlabel="step", ylabel="loss", yscale="log")
panel.legend(loc="upper right")
figure.savefig(args.output / "long_run.png", dpi=120)
print(f"wrote {args.output / 'long_run.png'}")
