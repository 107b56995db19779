"""One training script on one device, on eight devices, and on two processes with four each.

The training code does not mention the number of devices or hosts: it uses what it is started on.
Here the CPU is split into eight devices, and two processes on this machine take the place of two
hosts. On a cluster each host runs the same script. The script starts itself three times and
compares the results.

    python examples/several_hosts.py            # one or two minutes on two CPU cores
    python examples/several_hosts.py --quick    # half of that
"""

# %% Options. The script sets `--report` itself when it starts a training run
from _example import arguments

args = arguments(
    __doc__,
    quick="1 600 digits",
    epochs=2,
    batch_size=64,
    report=("", "file for the results; set by the script itself"),
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


# %% The model. BatchNorm computes its means over the whole batch, even if the batch is divided
# among devices
class Net(nn.Module):
    @nn.compact
    def __call__(self, x, train):
        x = x.astype(jnp.float32) / 255
        for width in (8, 16):
            x = nn.Conv(width, (3, 3), strides=2, use_bias=False)(x)
            x = nn.relu(nn.BatchNorm(use_running_average=not train)(x))
        return nn.Dense(10)(nn.relu(nn.Dense(128)(x.reshape(len(x), -1))))


# %% Training. The mesh includes all devices of all processes. The rule `fsdp` divides the arrays of
# the state among the devices, and `sharding` divides the batches
def train():
    # With a single process this call does nothing.
    ft.distributed.initialize()
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


# %% A training run. The first process writes the results to `--report`
if args.report:
    (_, history), whole, params = train()
    if jax.process_index() == 0:
        losses = history.steps["loss"].tolist()
        accuracy = float(history.epochs["accuracy"][-1])
        results = {
            "whole": whole.splitlines()[-1],
            "params": params,
            "loss": losses,
            "accuracy": accuracy,
        }
        pathlib.Path(args.report).write_text(json.dumps(results))
    sys.exit()

# %% The same command, started in three ways. `functrain.launch` starts two processes with four
# devices each
LAUNCH = ["-m", "functrain.launch", "-n", "2", "--cpu-devices", "4"]
ways = {
    "one device": ([], 1),
    "eight devices": ([], 8),
    "two processes of four": (LAUNCH, 1),
}
reports = {}
for name, (launcher, devices) in ways.items():
    print(f"{name}:", flush=True)
    report_path = args.output / f"{name.replace(' ', '-')}.json"
    command = [sys.executable, *launcher, *sys.argv, "--report", str(report_path)]
    flags = f"--xla_force_host_platform_device_count={devices}"
    subprocess.run(command, check=True, env={**os.environ, "XLA_FLAGS": flags})
    reports[name] = json.loads(report_path.read_text())
    report_path.unlink()

# %% The memory of each device. It is printed for the whole state, and then for each of the params
for name, report in reports.items():
    print(f"{name}: {report['whole']}")
print(reports["two processes of four"]["params"])

# %% The results. Sums are computed in a different order on several devices, so the last digits of
# the losses may differ
first = reports["one device"]
for name, report in reports.items():
    difference = np.max(np.abs(np.subtract(report["loss"], first["loss"])))
    print(
        f"{name}: accuracy {report['accuracy']:.4f}, losses within {difference:.1e} of one device"
    )

# %% Plot. The training loss of the three runs
figure = matplotlib.figure.Figure(figsize=(7, 4), layout="constrained")
panel = figure.subplots()
for (name, report), style in zip(reports.items(), ("-", "--", ":"), strict=True):
    panel.plot(report["loss"], style, label=name)
panel.set(xlabel="step", ylabel="loss", yscale="log")
panel.legend()
figure.savefig(args.output / "several_hosts.png", dpi=120)
print(f"wrote {args.output / 'several_hosts.png'}")
