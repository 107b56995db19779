"""Memory at its peak: saving takes the state once more at the most, and a bounded buffer."""

import subprocess
import sys

import pytest

PROGRAM = """
import gc, pathlib, sys, jax, numpy as np, functrain as ft

kind, directory, leaves = sys.argv[1], sys.argv[2], 10
each = 50 * 2**20 // leaves
status = pathlib.Path("/proc/self/status")

def mib(name):
    return int(status.read_text().split(name + ":")[1].split()[0]) / 2**10

def make():
    if kind == "numpy":
        chance = np.random.default_rng(0)
        return {f"w{i}": chance.standard_normal(each, np.float32) for i in range(leaves)}
    made = {f"w{i}": jax.random.normal(jax.random.key(i), (each,)) for i in range(leaves)}
    return jax.block_until_ready(made)

def peak(act):
    gc.collect()
    before = mib("VmRSS")
    pathlib.Path("/proc/self/clear_refs").write_text("5")
    act()
    return (mib("VmHWM") - before) / 200

checkpoints = ft.Checkpointer(directory)
warm = {"x": np.ones(3), "y": jax.numpy.ones(3)}
checkpoints.save(warm, 0)
checkpoints.restore(warm)
state = make()
print(peak(lambda: checkpoints.save(state, 1)))
like = jax.tree.map(np.empty_like, state) if kind == "numpy" else jax.eval_shape(lambda: state)
del state
print(peak(lambda: checkpoints.restore(like)))
print(peak(lambda: checkpoints.verify(1)))
"""


@pytest.mark.skipif(sys.platform != "linux", reason="the peak is read from /proc")
@pytest.mark.parametrize("kind", ["jax", "numpy"])
def test_saving_and_loading_take_no_more_than_they_say(tmp_path, kind) -> None:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, kind, tmp_path], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    saving, loading, verifying = map(float, done.stdout.split())
    # A state of 200 MiB; Orbax's own buffers are bounded, and here up to a state: of 1 GiB, saving
    # takes 0.63 states of jax arrays and 1.93 of NumPy's, loading 1.18.
    assert saving < (2.6 if kind == "numpy" else 1.6)
    assert loading < 2.1
    assert verifying < 1.5
