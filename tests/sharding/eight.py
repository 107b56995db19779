"""Trainings on eight CPU devices; see test_eight_devices.py.

python eight.py MODEL:FORM ...     prints a line of JSON for each
"""

import json
import math
import os
import sys
from typing import Any

os.environ["KERAS_BACKEND"] = "jax"
os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=8"

import flax.linen as nn
import jax
import numpy as np
import optax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import functrain as ft

RNG = np.random.default_rng(0)


class MLP(nn.Module):
    @nn.compact
    def __call__(self, x: Any, train: bool = False) -> Any:
        x = nn.Dropout(0.2, deterministic=not train)(nn.relu(nn.Dense(32)(x)))
        return nn.Dense(8)(x)


class Transformer(nn.Module):
    @nn.compact
    def __call__(self, x: Any, train: bool = False) -> Any:
        x = nn.Embed(16, 16)(x)
        for _ in range(2):
            x = x + nn.MultiHeadDotProductAttention(num_heads=8, qkv_features=16)(nn.LayerNorm()(x))
            x = x + nn.Dense(16)(nn.gelu(nn.Dense(64)(nn.LayerNorm()(x))))
        return nn.Dense(8)(x)


def tensor(path: str, x: Any, mesh: Any) -> P:
    """Divides the last axis over the model's, where it divides."""
    fits = x.ndim and x.shape[-1] % mesh.shape["model"] == 0
    return P(*[None] * (x.ndim - 1), "model") if fits else P()


def both(path: str, x: Any, mesh: Any) -> P:
    """The last axis over the model's, the one before over that of the data."""
    if x.ndim < 2 or x.shape[-2] % mesh.shape["data"]:
        return tensor(path, x, mesh)
    return P(*[None] * (x.ndim - 2), "data", *tensor(path, x, mesh)[-1:])


FORMS: dict[str, Any] = {
    "data": ({"data": 8}, ft.sharding.replicated, P("data")),
    "fsdp": ({"data": 8}, ft.sharding.fsdp(min_size=1), P("data")),
    "tensor": ({"data": 1, "model": 8}, tensor, P("data")),
    "data x tensor": ({"data": 2, "model": 4}, tensor, P("data")),
    "fsdp x tensor": ({"data": 4, "model": 2}, both, P("data")),
    "fsdp over both": (
        {"data": 4, "model": 2},
        ft.sharding.fsdp(("data", "model"), min_size=1),
        P(("data", "model")),
    ),
    "batch x sequence": ({"data": 2, "sequence": 4}, ft.sharding.replicated, P("data", "sequence")),
}
LABELS = RNG.integers(0, 8, 64)
DATA: dict[str, Any] = {
    "mlp": (MLP(), (RNG.normal(size=(64, 24)).astype(np.float32), LABELS)),
    "transformer": (
        Transformer(),
        (RNG.integers(0, 16, (64, 8)).astype(np.int32), RNG.integers(0, 8, (64, 8))),
    ),
}


def of_each_device(state: Any) -> list[int]:
    held = dict.fromkeys(jax.devices(), 0)
    for leaf in jax.tree.leaves(state.replace(rng=None)):
        for shard in leaf.addressable_shards:
            held[shard.device] += shard.data.nbytes
    return list(held.values())


def by_the_rule(state: Any, mesh: Any, rule: Any) -> int:
    """The bytes of a state on a device, counted here: moments are divided as their params are."""
    total = 0
    parts = (state.params, state.model_state, state.opt_state[0].mu, state.opt_state[0].nu)
    for tree in parts:
        for path, x in jax.tree_util.tree_leaves_with_path(tree):
            names = [name for name in rule(str(path), x, mesh) if name]
            over = [n for name in names for n in ((name,) if isinstance(name, str) else name)]
            total += x.nbytes // math.prod(mesh.shape[n] for n in over)
    return total + sum(x.nbytes for x in (state.step, state.opt_state[0].count))


def train(name: str, form: str) -> dict[str, Any]:
    module, data = DATA[name]
    model, tx = ft.from_linen(module), optax.adam(1e-2)
    loss_fn = ft.supervised(model, optax.softmax_cross_entropy_with_integer_labels)

    def make() -> ft.TrainState:
        params, model_state = model.init(jax.random.key(0), data[0][:1])
        key = jax.random.key(1)
        return ft.TrainState.create(params=params, model_state=model_state, tx=tx, rng=key)

    axes, rule, batch = FORMS[form]
    mesh, step = ft.sharding.mesh(axes), ft.train_step(loss_fn, tx)
    state = ft.sharding.create(make, mesh, rule)
    before = [x.sharding for x in jax.tree.leaves(state)]
    found: dict[str, Any] = {"bytes": of_each_device(state), "rule": by_the_rule(state, mesh, rule)}
    loader = ft.ArrayLoader(data, 16, shuffle=True)
    how: Any = {"verbose": 0, "sharding": NamedSharding(mesh, batch)}
    result = ft.fit(state, step, loader, **how)
    found["losses"] = result.history.steps["loss"].tolist()
    found["stays"] = [x.sharding for x in jax.tree.leaves(result.state)] == before
    found["alone"] = ft.fit(make(), step, loader, verbose=0).history.steps["loss"].tolist()
    if name == "mlp":  # what it costs to compile, the others can do without
        single = ft.fit(state, step, loader, fuse=1, **how).history.steps["loss"].tolist()
        found["same for each K"] = single == found["losses"]
    return found


def keras_model(form: str) -> dict[str, Any]:
    import bridge  # isort: skip
    import keras
    from keras import layers

    def fresh() -> Any:
        keras.utils.set_random_seed(0)
        net = [keras.Input((8, 8, 3)), layers.Conv2D(8, 3, use_bias=False)]
        net += [layers.BatchNormalization(), layers.ReLU(), layers.GlobalAveragePooling2D()]
        model = keras.Sequential([*net, layers.Dropout(0.2), layers.Dense(8)])
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile("adam", loss, metrics=["accuracy"])
        return model

    axes, rule, _ = FORMS[form]
    distribution = bridge.to_distribution(ft.sharding.mesh(axes), rule)
    how: Any = {"batch_size": 16, "epochs": 2, "verbose": 0, "shuffle": False}
    data = RNG.normal(size=(64, 8, 8, 3)).astype(np.float32), LABELS
    with distribution.scope():
        ours, theirs = fresh(), fresh()
        before = [v.value.sharding for v in ours.variables]
        losses = bridge.fit(ours, *data, **how, rewrites="exact").history["loss"]
        expected = theirs.fit(*data, **how).history["loss"]
        after = [v.value.sharding for v in ours.variables]
        slots = [v.value.sharding for v in ours.optimizer.variables]
        of_keras = [v.value.sharding for v in theirs.optimizer.variables]
        kernel = ours.layers[0].kernel.value
    return {
        "losses": losses,
        "keras": expected,
        "alone": bridge.fit(fresh(), *data, **how).history["loss"],
        "stays": before == after and slots == of_keras,
        "part": kernel.nbytes // kernel.addressable_shards[0].data.nbytes,
    }


if __name__ == "__main__":
    for asked in sys.argv[1:]:
        name, form = asked.split(":")
        print(json.dumps(keras_model(form) if name == "keras" else train(name, form)), flush=True)
