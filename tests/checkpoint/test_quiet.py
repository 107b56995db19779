"""What goes wrong is said once: no tracebacks of Orbax's beside the message."""

import subprocess
import sys
import textwrap

import pytest

SETUP = """
import pathlib, resource, signal, sys, tempfile
import numpy as np
import functrain as ft

state = {f"w{i}": np.random.default_rng(i).standard_normal(2000) for i in range(12)}

def change(path, how):
    data = bytearray(path.read_bytes())
    if how == "flip":
        data[len(data) // 2] ^= 8
    path.write_bytes(data if how == "flip" else b"" if how == "cut" else bytes(len(data)))
    if how == "remove":
        path.unlink()

def damage(folder, pattern, how):
    paths = list(pathlib.Path(folder, "arrays").rglob(pattern))
    assert paths
    for path in paths:
        change(path, how)
"""


def stderr_of(script: str) -> str:
    """Runs a script in a process of its own, since only there all that is printed can be seen."""
    program = SETUP + "with tempfile.TemporaryDirectory() as d:\n" + textwrap.indent(script, "    ")
    ran = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert ran.stdout == "done\n", ran.stderr
    return ran.stderr


def test_damage_of_any_kind_is_one_warning() -> None:
    said = stderr_of(
        """
with ft.Checkpointer(d + "/run") as checkpoints:
    for step in range(1, 14):
        checkpoints.keep = checkpoints.series.keep = None
        checkpoints.save(state, step)
patterns = ["manifest.ocdbt", "ocdbt.process_0/d/*", "_METADATA"]
kinds = [(pattern, how) for pattern in patterns for how in ("flip", "cut", "zero", "remove")]
for step, (pattern, how) in enumerate(kinds, 2):
    damage(d + f"/run/{step:012d}", pattern, how)
restored = ft.Checkpointer(d + "/run").restore(state).position.step
assert restored == 13, restored  # Orbax's own metadata are not needed
for step in range(10, 14):
    damage(d + f"/run/{step:012d}", "d/*", "flip")
restored = ft.Checkpointer(d + "/run").restore(state).position.step
assert restored == 1, restored
print("done")
"""
    )
    assert said.count("UserWarning: Passed over, for step 1: ") == 12
    assert "Traceback" not in said
    assert "ERROR" not in said
    assert len(said) < 12 * 5000
    assert all(len(line) < 1000 for line in said.splitlines())


@pytest.mark.parametrize("door", ["save", "Checkpointer"])
def test_a_save_that_fails_is_one_error(door: str) -> None:
    said = stderr_of(
        f"""
act = ft.save if {door == "save"} else lambda path, state: ft.Checkpointer(path).save(state, 1)
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (1000, resource.getrlimit(resource.RLIMIT_FSIZE)[1]))
try:
    act(d + "/run", state)
except OSError as error:
    assert error.__cause__ is None and error.__suppress_context__, error
    assert "run" in str(error) and len(str(error)) < 500, error
resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY,) * 2)
print("done")
"""
    )
    assert said == ""


def test_what_orbax_warns_of_in_a_save_that_succeeds_is_shown() -> None:
    said = stderr_of(
        """
from orbax.checkpoint import v1
from absl import logging
import orbax.checkpoint
code = compile("logging.warning('mind the step')", orbax.checkpoint.__file__, "exec")
save = v1.save
v1.save = lambda *args: (exec(code), save(*args))
ft.save(d + "/one", state)
print("done")
"""
    )
    assert said.count("mind the step") == 1
