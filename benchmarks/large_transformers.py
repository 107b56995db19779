"""Transformers of 7 B and 70 B parameters, as shapes, and rules that divide them over devices."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import functrain as ft

# The tokens of a sequence. Each device has one sequence.
TOKENS = 2048


class Size(NamedTuple):
    """The sizes of a transformer; `words` is that of its vocabulary."""

    layers: int
    width: int
    heads: int
    # The number of heads of keys and values.
    groups: int
    hidden: int
    words: int = 32_000


SIZES = {"7B": Size(32, 4096, 32, 32, 11_008), "70B": Size(80, 8192, 64, 8, 28_672)}
# Tensor parallelism within a layer. Matrices with many outputs are divided by columns over "model",
# and the matrices that follow them, "out" and "down", by rows.
TENSOR = {
    "layers/[qkv]": P(None, "data", "model"),
    "layers/gate": P(None, "data", "model"),
    "layers/up": P(None, "data", "model"),
    "layers/out": P(None, "model", "data"),
    "layers/down": P(None, "model", "data"),
    "**": ft.sharding.fsdp("data"),
}
# The number of devices along the "model" axis, and the sharding rule.
WAYS: dict[str, tuple[int, Any]] = {
    "FSDP": (1, ft.sharding.fsdp("data")),
    "FSDP × tensor 8": (8, ft.sharding.rules(TENSOR)),
}


def params(size: Size) -> Any:
    """Returns the parameters, all zero; `jax.eval_shape` of this makes only their shapes."""

    def weights(*shape: int) -> jax.Array:
        return jnp.zeros(shape, jnp.float32)

    n, d, kv = size.layers, size.width, size.width // size.heads * size.groups
    layers = {
        "q": weights(n, d, d),
        "k": weights(n, d, kv),
        "v": weights(n, d, kv),
        "out": weights(n, d, d),
        "gate": weights(n, d, size.hidden),
        "up": weights(n, d, size.hidden),
        "down": weights(n, size.hidden, d),
        "norms": weights(n, 2, d),
    }
    return {"embed": weights(size.words, d), "layers": layers, "head": weights(d, size.words)}


def loss_of(size: Size, rows: NamedSharding) -> Any:
    """Returns the loss of a bfloat16 decoder, which recomputes each layer in the backward pass."""

    def stay(x: jax.Array) -> jax.Array:
        return jax.lax.with_sharding_constraint(x, rows)

    def norm(x: jax.Array, scale: jax.Array) -> jax.Array:
        return x * jax.lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + 1e-5) * (1 + scale)

    def layer(x: jax.Array, weights: Any) -> Any:
        w = jax.tree.map(lambda x: x.astype(jnp.bfloat16), weights)
        y, heads = norm(x, w["norms"][0]), (*x.shape[:2], -1, size.width // size.heads)
        q, k, v = ((y @ w[name]).reshape(heads) for name in "qkv")
        y = jax.nn.dot_product_attention(q, k, v, is_causal=True).reshape(x.shape)
        x = stay(x + y @ w["out"])
        y = norm(x, w["norms"][1])
        return stay(x + (jax.nn.silu(y @ w["gate"]) * (y @ w["up"])) @ w["down"]), None

    def loss_fn(params: Any, model_state: Any, batch: Any, *, rng: Any, training: bool) -> Any:
        x = stay(params["embed"].astype(jnp.bfloat16)[batch])
        x, _ = jax.lax.scan(jax.checkpoint(layer), x, params["layers"])
        logits = stay(x) @ params["head"].astype(jnp.bfloat16)
        loss = optax.softmax_cross_entropy_with_integer_labels(
            logits[:, :-1].astype(jnp.float32), batch[:, 1:]
        )
        return loss.mean(), ft.Aux(model_state)

    return loss_fn


def on_target(size: Size, target: ft.Target, way: str) -> tuple[Any, Any, Any, NamedSharding]:
    """Returns the shapes of the state on a target, the step, a batch, and the batch's sharding."""
    parts, rule = WAYS[way]
    count = len(target.devices)
    mesh = target.mesh({"data": count // parts, "model": parts})
    rows, tx = NamedSharding(mesh, P("data")), optax.adam(1e-4)
    state = jax.eval_shape(lambda: ft.TrainState.create(params=params(size), tx=tx))
    state = target.shapes(state, ft.sharding.shardings(state, mesh, rule))
    batch = jax.ShapeDtypeStruct((count, TOKENS), np.int32)
    return state, ft.train_step(loss_of(size, rows), tx), batch, rows
