"""One training script, on one device, on eight, and on two processes with four each.

What it is run on is said by the machine and by who starts it, nowhere in the training. Eight
devices are made of the CPU here, and two hosts are two processes; on a cluster each host runs the
same script. It starts itself three times, and compares what comes out.

    python examples/several_hosts.py            # a minute or two on two CPU cores
    python examples/several_hosts.py --quick    # half of that
"""

# %% The options
from _example import arguments

args = arguments(
    __doc__,
    quick="1 600 digits",
    epochs=2,
    batch_size=64,
    report=("", "where to write what came out; set by the script itself"),
)

import json
import os
import pathlib
import subprocess
import sys

import flax.linen as nn
import functrain as ft
import jax
import jax.numpy as jnp
import matplotlib.figure
import numpy as np
import optax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P


# %% A convnet. BatchNorm's means are those of the whole batch, wherever its parts are
class Net(nn.Module):
    @nn.compact
    def __call__(self, x, train):
        x = x.astype(jnp.float32) / 255
        for width in (8, 16):
            x = nn.Conv(width, (3, 3), strides=2, use_bias=False)(x)
            x = nn.relu(nn.BatchNorm(use_running_average=not train)(x))
        return nn.Dense(10)(nn.relu(nn.Dense(128)(x.reshape(len(x), -1))))


# %% The training: a mesh of whatever devices there are, a rule for the state, and fit
def train():
    ft.distributed.initialize()  # does nothing where there is one process
    mesh = ft.sharding.mesh({"data": -1})
    with np.load(args.data / "mnist.npz") as file:
        x, y = file["x_train"][..., None], file["y_train"].astype(np.int32)
    x, y = (part[: 1_600 if args.quick else 8_000] for part in (x, y))
    model, tx = ft.from_linen(Net()), optax.adamw(2e-3)

    def make():
        params, model_state = model.init(jax.random.key(args.seed), x[:1])
        return ft.TrainState.create(params=params, model_state=model_state, tx=tx)

    state = ft.sharding.create(make, mesh, ft.sharding.fsdp(min_size=1_000))
    loss_fn = ft.supervised(model, optax.softmax_cross_entropy_with_integer_labels)
    metrics = {"accuracy": ft.metrics.accuracy()}
    result = ft.fit(
        state,
        ft.train_step(loss_fn, tx, metrics=metrics),
        ft.ArrayLoader((x, y), args.batch_size, shuffle=True, drop_remainder=True),
        epochs=args.epochs,
        sharding=NamedSharding(mesh, P("data")),
        verbose="lines",
    )
    return result, ft.inspect.placement(state), ft.inspect.placement(state.params)


# %% One run of it: what to compare is written by the first process
if args.report:
    (_, history), whole, params = train()
    if jax.process_index() == 0:
        losses = history.steps["loss"].tolist()
        accuracy = float(history.epochs["accuracy"][-1])
        found = {
            "whole": whole.splitlines()[-1],
            "params": params,
            "loss": losses,
            "accuracy": accuracy,
        }
        pathlib.Path(args.report).write_text(json.dumps(found))
    sys.exit()

# %% The same command, started in three ways
LAUNCH = ["-m", "functrain.launch", "-n", "2", "--cpu-devices", "4"]
ways = {
    "one device": ([], 1),
    "eight devices": ([], 8),
    "two processes of four": (LAUNCH, 1),
}
found = {}
for name, (launcher, devices) in ways.items():
    print(f"{name}:", flush=True)
    report = args.output / f"{name.replace(' ', '-')}.json"
    command = [sys.executable, *launcher, *sys.argv, "--report", str(report)]
    flags = f"--xla_force_host_platform_device_count={devices}"
    subprocess.run(command, check=True, env={**os.environ, "XLA_FLAGS": flags})
    found[name] = json.loads(report.read_text())
    report.unlink()

# %% What each device had
for name, one in found.items():
    print(f"{name}: {one['whole']}")
print(found["two processes of four"]["params"])

# %% The numbers: sums are taken in another order, so that last digits may differ
first, *others = found.values()
for name, one in found.items():
    off = np.max(np.abs(np.subtract(one["loss"], first["loss"])))
    print(f"{name}: accuracy {one['accuracy']:.4f}, losses within {off:.1e} of the first")

# %% A picture
figure = matplotlib.figure.Figure(figsize=(7, 4), layout="constrained")
panel = figure.subplots()
for (name, one), style in zip(found.items(), ("-", "--", ":"), strict=True):
    panel.plot(one["loss"], style, label=name)
panel.set(xlabel="step", ylabel="loss", yscale="log")
panel.legend()
figure.savefig(args.output / "several_hosts.png", dpi=120)
print(f"wrote {args.output / 'several_hosts.png'}")
