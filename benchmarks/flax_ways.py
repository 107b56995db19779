"""Training loops in the usual style of flax linen and nnx, for the small networks."""

import itertools
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from flax.training.train_state import TrainState

from benchmarks.jax_ways import adam, zero_totals
from benchmarks.keras_ways import Run
from benchmarks.workloads import Workload

# The number of inputs, then the width of every layer.
MLPS = {
    "digits-mlp": (64, 32, 10),
    "mnist-mlp": (784, 64, 64, 10),
    "tabular-mlp": (32, 128, 128, 2),
}


def _cross_entropy(logits: jax.Array, y: jax.Array) -> jax.Array:
    return optax.softmax_cross_entropy_with_integer_labels(logits, y).mean()


class LinenMlp(nn.Module):
    """Dense layers with ReLU in between."""

    widths: tuple[int, ...]

    @nn.compact
    def __call__(self, x):
        """Returns logits."""
        for width in self.widths[:-1]:
            x = nn.relu(nn.Dense(width)(x))
        return nn.Dense(self.widths[-1])(x)


class LinenConvnet(nn.Module):
    """`workloads.convnet` in linen."""

    @nn.compact
    def __call__(self, x):
        """Returns logits."""
        for features in (32, 64):
            x = nn.relu(nn.Conv(features, (3, 3), padding="VALID")(x))
            x = nn.max_pool(x, (2, 2), strides=(2, 2))
        return nn.Dense(10)(x.reshape(len(x), -1))


def linen(workload: Workload) -> Run:
    """Returns the usual linen loop: flax's TrainState and a jitted step."""
    mlp = MLPS.get(workload.name)
    module = LinenMlp(mlp[1:]) if mlp else LinenConvnet()
    names = [f"Dense_{i}" for i in range(len(mlp) - 1)] if mlp else ["Conv_0", "Conv_1", "Dense_0"]
    weights = [jnp.array(w) for w in workload.model().get_weights()]
    layers = zip(names, weights[::2], weights[1::2], strict=True)
    params = {name: {"kernel": kernel, "bias": bias} for name, kernel, bias in layers}
    state = TrainState.create(apply_fn=module.apply, params=params, tx=adam())
    x, y = workload.data()

    def train_step(state: TrainState, totals: Any, x: Any, y: Any) -> tuple[TrainState, Any]:
        def loss_fn(params: Any) -> tuple[jax.Array, jax.Array]:
            logits = state.apply_fn({"params": params}, x)
            return _cross_entropy(logits, y), logits

        (loss, logits), grads = jax.value_and_grad(loss_fn, has_aux=True)(state.params)
        hits = jnp.mean(jnp.argmax(logits, -1) == y)
        totals = {"loss": totals["loss"] + loss, "hits": totals["hits"] + hits}
        return state.apply_gradients(grads=grads), totals

    step = jax.jit(train_step, donate_argnums=(0, 1))

    def run() -> float:
        nonlocal state
        totals = zero_totals()
        for i in range(0, len(x), workload.batch):
            state, totals = step(
                state, totals, x[i : i + workload.batch], y[i : i + workload.batch]
            )
        jax.block_until_ready(state.params)
        return float(totals["loss"]) / workload.steps

    return run


class NnxMlp(nnx.Module):
    """Dense layers with ReLU in between."""

    def __init__(self, widths: tuple[int, ...], rngs: nnx.Rngs):
        pairs = itertools.pairwise(widths)
        self.layers = nnx.List([nnx.Linear(a, b, rngs=rngs) for a, b in pairs])

    def __call__(self, x):
        """Returns logits."""
        for layer in self.layers[:-1]:
            x = nnx.relu(layer(x))
        return self.layers[-1](x)


class NnxConvnet(nnx.Module):
    """`workloads.convnet` in nnx."""

    def __init__(self, rngs: nnx.Rngs):
        valid: Any = {"kernel_size": (3, 3), "padding": "VALID", "rngs": rngs}
        convs = [nnx.Conv(1, 32, **valid), nnx.Conv(32, 64, **valid)]
        self.layers = nnx.List([*convs, nnx.Linear(1600, 10, rngs=rngs)])

    def __call__(self, x):
        """Returns logits."""
        for conv in self.layers[:-1]:
            x = nnx.max_pool(nnx.relu(conv(x)), (2, 2), strides=(2, 2))
        return self.layers[-1](x.reshape(len(x), -1))


def nnx_loop(workload: Workload) -> Run:
    """Returns the usual nnx loop: `nnx.jit` updates module, Optimizer and MultiMetric in place."""
    mlp, rngs = MLPS.get(workload.name), nnx.Rngs(0)
    model = NnxMlp(mlp, rngs) if mlp else NnxConvnet(rngs)
    weights = workload.model().get_weights()
    for layer, kernel, bias in zip(model.layers, weights[::2], weights[1::2], strict=True):
        layer.kernel[...], layer.bias[...] = jnp.array(kernel), jnp.array(bias)
    optimizer = nnx.Optimizer(model, adam(), wrt=nnx.Param)
    metrics = nnx.MultiMetric(accuracy=nnx.metrics.Accuracy(), loss=nnx.metrics.Average("loss"))
    x, y = workload.data()

    @nnx.jit
    def train_step(model: Any, optimizer: Any, metrics: Any, x: Any, y: Any) -> None:
        def loss_fn(model: Any) -> tuple[jax.Array, jax.Array]:
            logits = model(x)
            return _cross_entropy(logits, y), logits

        (loss, logits), grads = nnx.value_and_grad(loss_fn, has_aux=True)(model)
        metrics.update(loss=loss, logits=logits, labels=y)
        optimizer.update(model, grads)

    def run() -> float:
        metrics.reset()
        for i in range(0, len(x), workload.batch):
            batch = x[i : i + workload.batch], y[i : i + workload.batch]
            train_step(model, optimizer, metrics, *batch)
        jax.block_until_ready(nnx.state(model))
        return float(np.asarray(metrics.compute()["loss"]))

    return run
