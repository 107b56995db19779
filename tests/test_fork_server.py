"""A process of the fork server is what a subprocess is."""

import os
import pathlib
import subprocess
import sys
from types import ModuleType

import pytest

from tests import fork_server

PROGRAM = """
import atexit, os, sys, threading, time
print("argv", sys.argv[1:], "name", __name__, "path", sys.path[0])
print("cwd", os.getcwd(), "mine", os.environ["MINE"], "HOME" in os.environ)
print("read", sys.stdin.read(), flush=True)
os.write(1, b"below python\\n")
print("to stderr", file=sys.stderr)
threading.Thread(target=lambda: [time.sleep(0.1), print("of a thread")]).start()
atexit.register(lambda: print("at exit"))
"""
ENDS = {
    "the end": "",
    "a status": "sys.exit(3)",
    "a message": "sys.exit('why')",
    "an error": "raise KeyError('mine')",
    "at once": "os._exit(7)",
    "killed": "os.kill(os.getpid(), 9)",
}


@pytest.mark.smoke
def test_it_begins_and_ends_as_a_subprocess_does(tmp_path: pathlib.Path) -> None:
    def outcome(way: ModuleType, *program: object) -> tuple[int, str, str]:
        command = [sys.executable, *program, "one", tmp_path / "two"]
        env = {"MINE": "yes"} | os.environ
        del env["HOME"]
        done = way.run(
            command, input="given", cwd=tmp_path, env=env, capture_output=True, text=True
        )
        return done.returncode, done.stdout, done.stderr.splitlines()[-1]

    (tmp_path / "program.py").write_text(PROGRAM)
    programs = [["-c", PROGRAM + end] for end in ENDS.values()]
    for program in [*programs, ["program.py"], ["-m", "program"]]:
        assert outcome(fork_server, *program) == outcome(subprocess, *program)


def test_jax_is_imported_in_it_and_begins_with_its_own_flags() -> None:
    code = """
import sys
assert {"jax", "keras", "functrain", "bridge"} <= {*sys.modules}
import bridge, functrain, jax
assert bridge.fit and functrain.fit
assert not jax._src.xla_bridge.backends_are_initialized()
print(jax.device_count(), jax.numpy.arange(3.0).sum())
"""
    for count in (3, 5):
        env = os.environ | {"XLA_FLAGS": f"--xla_force_host_platform_device_count={count}"}
        done = fork_server.run(
            [sys.executable, "-c", code], env=env, capture_output=True, text=True
        )
        assert done.stdout.split() == [str(count), "3.0"], done.stderr


def test_what_it_would_take_no_notice_of_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    for env in ({"JAX_ENABLE_X64": "1"}, {"KERAS_BACKEND": "torch"}, {"PYTHONWARNINGS": "error"}):
        with pytest.raises(ValueError, match="expected"):
            fork_server.run([sys.executable, "-c", ""], env=os.environ | env)
