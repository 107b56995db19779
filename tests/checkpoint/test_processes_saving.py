"""Two processes, one of whose clocks or signals decides when both save."""

import pathlib
import signal

import numpy as np
import pytest

import functrain as ft
from tests.several_processes import lines_starting, outputs, start

PROGRAM = """
import os, sys, time
os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=1"
import jax, jax.numpy as jnp, functrain as ft

ft.distributed.initialize()
rows = jax.NamedSharding(ft.sharding.mesh({"data": 2}), jax.P("data"))

def wait(event):
    if isinstance(event, ft.events.ChunkEnd):
        print("step", event.step, flush=True)
        # The processes are not at the same step at the same time.
        time.sleep(0.02 * (1 + (event.step + jax.process_index()) % 2))

def step(w, x):
    return w + jnp.mean(x), {}

every = ft.every(seconds=0.4) if sys.argv[2] == "clock" else ft.every(minutes=10)
checkpoints = ft.Checkpointer(sys.argv[1], every=every, keep=None)
options = {"sharding": rows, "checkpointer": checkpoints, "fuse": 2, "verbose": 0}
w, _ = ft.fit(jnp.zeros(()), step, [jnp.ones(4)] * 120, hooks=[wait], **options)
print("ends", float(w), checkpoints.steps())
"""


def test_a_clock_of_one_process_saves_in_all(tmp_path: pathlib.Path) -> None:
    program = ["-c", PROGRAM]
    first, second = lines_starting(
        outputs(start(2, program, str(tmp_path / "run"), "clock")), "ends"
    )
    assert first == second
    assert first.startswith("ends 120.0 [")
    assert first.count(",") > 2  # 60 chunks of 30 ms each, and 0.4 s between saves
    steps = [int(x) for x in first.partition("[")[2].rstrip("]").split(",")]
    for step in steps:
        assert float(ft.load(tmp_path / "run" / f"{step:012d}", np.float32(0))) == step


@pytest.mark.parametrize("asked", [0, 1])
def test_a_signal_to_one_process_saves_in_all_which_go_on(
    tmp_path: pathlib.Path, asked: int
) -> None:
    processes = start(2, ["-c", PROGRAM], str(tmp_path / "run"), "signal")
    stream = processes[asked].stdout
    assert stream is not None
    for line in stream:
        if line in ("step 20\n", "step 60\n"):
            processes[asked].send_signal(signal.SIGUSR1)
        if line.startswith("step 90"):
            break
    first, second = lines_starting(outputs(processes), "ends")
    assert first == second
    steps = [int(x) for x in first.partition("[")[2].rstrip("]").split(",")]
    assert len(steps) == 3
    assert 20 <= steps[0] < 60 <= steps[1] < 120 == steps[2]
