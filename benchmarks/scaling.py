"""Computes the memory and communication of 7 B and 70 B transformers on 64 and 512 devices.

    python -m benchmarks.scaling                # all rows, a few minutes on two CPU cores
    python -m benchmarks.scaling --only 7B 64   # the rows with these words

Only shapes are used, and no state is allocated: `jax.eval_shape` makes the states,
`functrain.sharding` computes their shardings, and XLA compiles an Adam step for that many CPU
devices. A row has the bytes of the state on each device by our rules and by the compiler, the
temporary memory that the compiler needs, and the bytes that a step sends.
"""

import argparse
import math
import os
import subprocess
import sys
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


def row(name: str, devices: int, way: str) -> str:
    """Returns one row of the table, compiled in a process with that many devices."""
    size, (parts, rule) = SIZES[name], WAYS[way]
    mesh = ft.sharding.mesh({"data": devices // parts, "model": parts})
    rows, tx = NamedSharding(mesh, P("data")), optax.adam(1e-4)
    state = jax.eval_shape(lambda: ft.TrainState.create(params=params(size), tx=tx))
    shardings = ft.sharding.shardings(state, mesh, rule)
    state_bytes = sum(
        math.prod(s.shard_shape(x.shape)) * x.dtype.itemsize
        for x, s in zip(*map(jax.tree.leaves, (state, shardings)), strict=True)
    )
    count = sum(math.prod(x.shape) for x in jax.tree.leaves(state.params))
    state = jax.tree.map(
        lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s), state, shardings
    )
    batch = jax.ShapeDtypeStruct((devices, TOKENS), np.int32, sharding=rows)
    step = jax.jit(
        ft.train_step(loss_of(size, rows), tx), out_shardings=(shardings, None), donate_argnums=0
    )
    program = step.lower(state, batch).compile()
    memory, sent = program.memory_analysis(), ft.sharding.collectives(program)
    moved = ", ".join(f"{x.calls} {kind} ({x.bytes / 2**30:.1f})" for kind, x in sent.items())
    gib = [
        x / 2**30 for x in (state_bytes, memory.argument_size_in_bytes, memory.temp_size_in_bytes)
    ]
    return (
        f"| {name} ({count / 1e9:.1f}) | {devices} | {way} | {gib[0]:.2f} | {gib[1]:.2f} | "
        f"{gib[2]:.1f} | {moved} |"
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", nargs="*", default=[], help="words that the rows must have")
    parser.add_argument("--row", nargs=3, help="one row: model, devices, way; in this process")
    args = parser.parse_args()
    if args.row:
        print(row(args.row[0], int(args.row[1]), args.row[2]), flush=True)
        return
    print(
        "| model (10⁹ parameters) | devices | rule | state a device by the rule, GiB | by the "
        "compiler | beside it, GiB | a step sends (GiB a device) |\n|---|---|---|---|---|---|---|",
        flush=True,
    )
    for name in SIZES:
        for devices in ("64", "512"):
            for way in WAYS:
                if set(args.only) <= {name, devices, *way.split()}:
                    flags = f"--xla_force_host_platform_device_count={devices}"
                    subprocess.run(
                        [sys.executable, "-m", "benchmarks.scaling", "--row", name, devices, way],
                        check=True,
                        env={**os.environ, "XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu"},
                    )


if __name__ == "__main__":
    main()
