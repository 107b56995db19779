"""No implicit transfer: fits, evaluations and fused steps under ``jax.transfer_guard``."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import functrain as ft

from ..conftest import digest

RNG = np.random.default_rng(0)
X, Y = RNG.normal(size=(20, 4)).astype(np.float32), RNG.normal(size=(20, 1)).astype(np.float32)
TX = optax.adam(1e-2)


def loss_fn(params: Any, model_state: Any, batch: Any, *, rng: Any, training: bool) -> Any:
    x, y = batch
    return jnp.mean((x @ params["w"] - y) ** 2), ft.Aux(model_state)


STEP = ft.train_step(loss_fn, TX, metrics={"running": ft.metrics.mean_loss()})
EVAL = ft.eval_step(loss_fn)
MODEL = ft.Model(
    init=lambda key, x: ({"w": jnp.zeros((4, 1))}, {}),
    apply=lambda p, s, x, *, rng=None, training=False: ft.ModelOutput(x @ p["w"], s),
)


def loader(**how: Any) -> ft.ArrayLoader:
    return ft.ArrayLoader((X, Y), 4, shuffle=True, **how)


def start() -> ft.TrainState:
    return ft.TrainState.create(params={"w": jnp.zeros((4, 1))}, tx=TX, rng=jax.random.key(0))


def replace(event: Any) -> None:
    if isinstance(event, ft.events.EpochEnd):
        event.state = event.state.replace(params={"w": np.ones((4, 1), np.float32)})


def fit(state: Any, directory: Any, data: Any = None, **how: Any) -> Any:
    data = loader() if data is None else data
    return ft.fit(state, STEP, data, epochs=2, fuse=3, verbose=0, **how).state


WAYS = {
    "fit": fit,
    "a list of arrays": lambda s, d: fit(s, d, [(X, Y)] * 3),
    "data on the device": lambda s, d: fit(s, d, loader(placement="device")),
    "evaluation": lambda s, d: fit(s, d, eval_data=loader(), eval_step=EVAL),
    "a hook that replaces the state": lambda s, d: fit(s, d, hooks=[replace]),
    "saved": lambda s, d: fit(s, d, checkpointer=ft.Checkpointer(d, every=2)),
    "evaluate": lambda s, d: np.array(list(ft.evaluate(s, EVAL, loader()).values())),
    "predict": lambda s, d: ft.predict(s, ft.predict_step(MODEL), ft.ArrayLoader(X, 4)),
    "NumPy state": lambda s, d: fit(jax.tree.map(np.asarray, s.replace(rng=None)), d),
    "no logs": lambda s, d: ft.fit(s, lambda s, b: (s, {}), ft.NoData(5), verbose=0).state,
}


@pytest.mark.parametrize("name", WAYS)
def test_a_run_makes_no_implicit_transfer(name, tmp_path) -> None:
    state, way = start(), WAYS[name]
    if name == "NumPy state":
        state = state.replace(rng=jnp.zeros(()))
    expected = way(state, tmp_path / "expected")
    with jax.transfer_guard("disallow"):
        got = way(state, tmp_path / "guarded")
        again = way(state, tmp_path / "guarded")  # resumes what was saved
    assert digest(got) == digest(expected) == digest(again)


@pytest.mark.parametrize("device", [None, 0, 1, "mesh"])
@pytest.mark.parametrize("steps", [3, 2])
def test_a_fused_step_makes_no_implicit_transfer_on_any_device(device, steps) -> None:
    place = {
        None: lambda x: x,
        "mesh": lambda x: jax.device_put(
            x, jax.NamedSharding(jax.make_mesh((2,), ("d",)), jax.P())
        ),
    }.get(device, lambda x: jax.device_put(x, jax.devices()[device]))
    step = ft.train_step(loss_fn, TX)
    state, chunk = place(start()), place(jax.device_put(loader().chunk(0, 0, 3)))
    fused = ft.fuse(step, 3, donate=False)
    expected = fused(state, chunk, steps=steps)
    with jax.transfer_guard("disallow"):
        assert digest(fused(state, chunk, steps=steps)) == digest(expected)
    assert {x.committed for x in jax.tree.leaves(expected)} == {device is not None}
    assert int(expected[0].step) == steps


def test_a_fused_step_within_jit_leaks_no_tracer() -> None:
    fused = ft.fuse(lambda s, b: (s + b.sum(), {}), 7)
    chunk = jnp.ones((7, 2))
    inner = jax.jit(lambda s, c: fused(s, c, steps=5)[0])(jnp.zeros(()), chunk)
    assert float(inner) == float(fused(jnp.zeros(()), chunk, steps=5)[0]) == 10
