"""What goes wrong is said once, without other tracebacks beside the message."""

import sys
import textwrap

import pytest

from tests import fork_server

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

def damage(folder, name, how):
    (path,) = pathlib.Path(folder).glob(name)
    change(path, how)
"""


def stderr_of(script: str) -> str:
    """Runs a script in a process of its own, since only there all that is printed can be seen."""
    program = SETUP + "with tempfile.TemporaryDirectory() as d:\n" + textwrap.indent(script, "    ")
    ran = fork_server.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert ran.stdout == "done\n", ran.stderr
    return ran.stderr


def test_damage_of_any_kind_is_one_warning() -> None:
    said = stderr_of(
        """
with ft.Checkpointer(d + "/run", keep=None) as checkpoints:
    for step in range(1, 9):
        checkpoints.save(state, step)
names = ["checkpoint.json", "arrays-0-*.safetensors"]
kinds = [(name, how) for name in names for how in ("flip", "cut", "zero")]
kinds.append(("arrays-0-*.safetensors", "remove"))
for step, (name, how) in enumerate(kinds, 2):
    damage(d + f"/run/{step:012d}", name, how)
restored = ft.Checkpointer(d + "/run").restore(state).position.step
assert restored == 1, restored
print("done")
"""
    )
    assert said.count("UserWarning: Passed over, for step 1: ") == 7
    assert "Traceback" not in said
    assert "ERROR" not in said
    assert len(said) < 7 * 5000
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
