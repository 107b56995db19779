"""Training on data that stays on disk needs memory for chunks, not for the data."""

import subprocess
import sys

import numpy as np

PROGRAM = """
import sys, jax.numpy as jnp, numpy as np, optax, functrain as ft

def anonymous():  # bytes that are in no file
    lines = open("/proc/self/smaps_rollup").read().splitlines()[1:]
    return int(dict(line.split(":") for line in lines)["Anonymous"].split()[0]) * 1024

x = np.load(sys.argv[1], mmap_mode="r")
model = ft.Model(
    init=None,
    apply=lambda p, s, x, *, rng=None, training=False: ft.ModelOutput(
        (x.astype(jnp.float32) / 255) @ p["w"], s
    ),
)
tx = optax.adam(1e-3)
state = ft.TrainState.create(params={"w": np.zeros((x.shape[1], 10), np.float32)}, tx=tx)
loss_fn = ft.supervised(model, optax.softmax_cross_entropy_with_integer_labels)
loader = ft.ArrayLoader((x, np.zeros(len(x), np.int32)), 64, shuffle=True)
before, peak = anonymous(), 0

@ft.every(steps=128)
def watch(event):
    global peak
    peak = max(peak, anonymous())

ft.fit(state, ft.train_step(loss_fn, tx), loader, fuse=32, hooks=[watch], verbose=0)
print(peak - before)
"""


def test_memory_stays_within_a_bound_that_does_not_depend_on_the_data(tmp_path) -> None:
    examples, width = 150_000, 3_072
    assert write(tmp_path / "x.npy", examples, width) > 400 * 2**20
    command = [sys.executable, "-c", PROGRAM, tmp_path / "x.npy"]
    grown = int(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
    chunk, depth, state = 32 * 64 * width, 3, 3 * width * 10 * 4
    assert grown < chunk * depth + state + 200 * 2**20


def write(path, examples, width) -> int:
    """Writes bytes and returns how many."""
    file = np.lib.format.open_memmap(path, mode="w+", dtype=np.uint8, shape=(examples, width))
    file[:] = np.arange(width, dtype=np.uint8)
    file.flush()
    return file.nbytes
