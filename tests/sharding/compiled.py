"""What compiled programs for eight devices send and hold; see test_eight_devices.py."""

import json
import os
from typing import Any

os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=8"

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import functrain as ft
from tests.sharding.eight import FORMS

TX = optax.adam(1e-2)


def loss(params: Any, x: Any, y: Any) -> Any:
    x = jnp.tanh(x @ params["up"]["kernel"] + params["up"]["bias"])
    return jnp.mean((x @ params["down"]["kernel"] - y) ** 2)


def loss_fn(params: Any, model_state: Any, batch: Any, *, rng: Any, training: bool) -> Any:
    return loss(params, *batch), ft.Aux(model_state)


def params() -> Any:
    up = {"kernel": jnp.ones((64, 128)), "bias": jnp.zeros(128)}
    return {"up": up, "down": {"kernel": jnp.ones((128, 32))}}


def compiled(program: Any, *args: Any) -> Any:
    return ft.sharding.collectives(program.lower(*args).compile())


def sent(form: str) -> list[Any]:
    """What a step sends: written by hand with pjit, by functrain's step, and fused."""
    axes, rule, batch = FORMS[form]
    mesh = ft.sharding.mesh(axes)
    state = ft.sharding.create(lambda: ft.TrainState.create(params=params(), tx=TX), mesh, rule)
    data = (np.zeros((16, 64), np.float32), np.zeros((16, 32), np.float32))
    one = jax.device_put(data, NamedSharding(mesh, batch))
    chunk = tuple(np.stack([x] * 2) for x in data)
    several = jax.device_put(chunk, NamedSharding(mesh, P(None, *batch)))

    def by_hand(params: Any, opt_state: Any, x: Any, y: Any) -> Any:
        value, gradients = jax.value_and_grad(loss)(params, x, y)
        updates, opt_state = TX.update(gradients, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, value

    parts = state.params, state.opt_state
    where = jax.tree.map(lambda x: x.sharding, parts)
    step = ft.train_step(loss_fn, TX)
    kept = jax.tree.map(lambda x: x.sharding, state)

    def staying(state: Any, batch: Any) -> Any:  # as fit keeps it
        state, logs = step(state, batch)
        return jax.lax.with_sharding_constraint(state, kept), logs

    fused = ft.fuse(staying, 2)
    return [
        compiled(jax.jit(by_hand, out_shardings=(*where, None)), *parts, *one),
        compiled(jax.jit(step, out_shardings=(kept, None)), state, one),
        compiled(fused, state, several, np.int32(2)),
    ]


def layers() -> dict[str, Any]:
    """Two dozen equal layers in a scan, whose activations stay divided by example."""
    mesh = ft.sharding.mesh({"data": 8})
    rows = NamedSharding(mesh, P("data"))

    def loss_fn(params: Any, model_state: Any, x: Any, *, rng: Any, training: bool) -> Any:
        def layer(x: Any, w: Any) -> Any:
            return jax.lax.with_sharding_constraint(jnp.tanh(x @ w), rows), None

        x, _ = jax.lax.scan(layer, jax.lax.with_sharding_constraint(x, rows), params["w"])
        return jnp.mean((x - 1) ** 2), ft.Aux(model_state)

    def make() -> ft.TrainState:
        return ft.TrainState.create(params={"w": jnp.zeros((24, 128, 128))}, tx=TX)

    state = jax.eval_shape(make)
    where = ft.sharding.shardings(state, mesh, ft.sharding.fsdp())
    state = jax.tree.map(
        lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s), state, where
    )
    batch = jax.ShapeDtypeStruct((64, 128), np.float32, sharding=rows)
    step = jax.jit(ft.train_step(loss_fn, TX), out_shardings=(where, None), donate_argnums=0)
    program = step.lower(state, batch).compile()
    text = program.as_text().splitlines()
    gathers = [line for line in text if " all-gather(" in line]
    alone = (ft.sharding.collectives(f"ENTRY %e () -> () {{\n{line}\n}}") for line in gathers)
    return {
        "gathered at once": sorted({found["all-gather"].bytes for found in alone}),
        "temporary": program.memory_analysis().temp_size_in_bytes,
        **ft.sharding.collectives(program),
    }


if __name__ == "__main__":
    found: dict[str, Any] = {
        form: sent(form) for form in ("data", "fsdp", "tensor", "fsdp x tensor")
    }
    print(json.dumps({**found, "layers": layers()}))
