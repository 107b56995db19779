"""A fit needs the memory of a loop by hand, and its history that of its numbers."""

import gc
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import functrain as ft

HELPERS = """
import sys, jax, jax.numpy as jnp, numpy as np, optax, functrain as ft

def anonymous():  # bytes that are in no file
    lines = open("/proc/self/smaps_rollup").read().splitlines()[1:]
    return int(dict(line.split(":") for line in lines)["Anonymous"].split()[0]) * 1024
"""

HISTORY = """
def step(state, batch):
    return state + batch.sum(), {str(i): state + i for i in range(6)}

loader = ft.ArrayLoader(np.ones(16_000, np.float32), 2)
before = []

@ft.at(2_000, 8_000)
def measure(event):
    before.append(anonymous())

_, history = ft.fit(jnp.zeros(()), step, loader, fuse=1, hooks=[measure], verbose=0)
assert all(len(x) == 8_000 for x in history.steps.values()), history
print((before[1] - before[0]) / 6_000)
"""


def printed(program: str, *arguments: str) -> float:
    command = [sys.executable, "-c", HELPERS + program, *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return float(done.stdout)


@pytest.mark.long
def test_history_of_a_million_single_steps_takes_megabytes() -> None:
    assert printed(HISTORY) < 400  # bytes a step, of six logs; 24 are the numbers themselves


@pytest.mark.parametrize(("donate", "states"), [(True, 1.6), (False, 2.6)])
def test_a_fit_needs_one_state_and_another_one_if_the_callers_stays(donate, states) -> None:
    def loss_fn(params, model_state, batch, *, rng, training):
        return jnp.mean((batch @ params["w"]) ** 2), ft.Aux(model_state)

    tx = optax.adam(1e-3)
    step, params = ft.train_step(loss_fn, tx), {"w": np.ones((1_000, 1_000), np.float32)}
    state = ft.TrainState.create(params=params, tx=tx)
    size = sum(x.nbytes for x in jax.tree.leaves(state))
    before, live = sum(x.nbytes for x in jax.live_arrays()) - size, []

    def measure(event):
        live.append(sum(x.nbytes for x in jax.live_arrays()) - before)

    data = ft.ArrayLoader(np.ones((96, 1_000), np.float32), 4)
    ft.fit(state, step, data, fuse=4, donate=donate, hooks=[measure], verbose=0)
    assert len(live) == 8
    assert max(live) < states * size


def test_fits_that_evaluate_leave_nothing_behind() -> None:
    def loss_fn(params, model_state, batch, *, rng, training):
        return jnp.mean((batch @ params["w"]) ** 2), ft.Aux(model_state)

    tx = optax.sgd(0.1)
    step, measure = ft.train_step(loss_fn, tx), ft.eval_step(loss_fn)
    data = ft.ArrayLoader(np.ones((4, 3), np.float32), 2)

    def objects_after(fits: int) -> int:
        for _ in range(fits):
            state = ft.TrainState.create(params={"w": jnp.ones(3)}, tx=tx)
            ft.fit(state, step, data, eval_data=data, eval_step=measure, verbose=0)
        gc.collect()
        return len(gc.get_objects())

    before = objects_after(3)
    assert objects_after(10) - before < 10 * 5
