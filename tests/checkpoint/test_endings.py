"""A save under way when something ends: the script, a program that owns the arrays, patience."""

import os
import signal
import subprocess
import sys
import threading
import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

import functrain as ft
from tests import fork_server
from tests.conftest import digest

START = """
import sys, os, numpy as np, functrain as ft
def state_of(n):
    return {"x": np.full(3_000_000, n), "y": [np.full(2, n)] * 30}
directory = sys.argv[1]
checkpoints = ft.Checkpointer(directory)
checkpoints.save(state_of(1), 1)
checkpoints.save(state_of(2), 2, wait=False)
"""
LIKE = {"x": np.zeros(3_000_000, int), "y": [np.zeros(2, int)] * 30}
ENDS = {
    "the script ends": ("", 0, ""),
    "sys.exit": ("sys.exit(3)", 3, ""),
    "an error": ("raise KeyError('mine')", 1, "mine"),
    "it is forgotten": ("del checkpoints", 0, ""),
}


QUICK = ("the script ends", "an error")


@pytest.mark.parametrize(
    "name", [n if n in QUICK else pytest.param(n, marks=pytest.mark.long) for n in ENDS]
)
def test_a_save_under_way_when_the_interpreter_ends_is_finished(tmp_path, name) -> None:
    end, code, says = ENDS[name]
    done = fork_server.run(
        [sys.executable, "-c", START + end, tmp_path], capture_output=True, text=True, check=False
    )
    assert done.returncode == code
    assert done.stderr.strip().endswith(f"KeyError: '{says}'" if says else ""), done.stderr
    checkpoints = ft.Checkpointer(tmp_path)
    assert checkpoints.steps() == [1, 2]
    assert np.all(checkpoints.restore(LIKE).state["x"] == 2)


def test_one_that_fails_then_is_not_lost_in_silence(tmp_path) -> None:
    program = (
        "import resource\nresource.setrlimit(resource.RLIMIT_FSIZE, (100_000, -1))\n"
        + START.replace("checkpoints.save(state_of(1), 1)\n", "").replace(
            "np.full(3_000_000, n)", "np.random.standard_normal(100_000)"
        )
    )
    done = fork_server.run(
        [sys.executable, "-c", program, tmp_path], capture_output=True, text=True, check=False
    )
    assert "functrain: a checkpoint could not be written" in done.stderr
    assert "too large" in done.stderr
    assert ft.Checkpointer(tmp_path).steps() == []


def test_ctrl_c_while_waiting_for_a_save_loses_neither_it_nor_the_one_before(tmp_path) -> None:
    program = (
        "import signal\nsignal.signal(signal.SIGINT, signal.default_int_handler)\n"
        f"{START}"
        "print('under way', flush=True)\n"
        "try:\n    checkpoints.close()\nexcept KeyboardInterrupt:\n    print('seen', flush=True)\n"
        "try:\n    ft.Checkpointer(directory).save(state_of(3), 3)\n"
        "except RuntimeError:\n    print('locked')\n"
    )
    for delay in (0.0, 0.02, 0.1):
        folder = tmp_path / str(delay)
        with fork_server.Popen(
            [
                sys.executable,
                "-c",
                "import signal; signal.signal(2, signal.default_int_handler)\n" + program,
                folder,
            ],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        ) as life:
            assert life.stdout is not None
            assert life.stdout.readline() == "under way\n"
            time.sleep(delay)
            life.send_signal(signal.SIGINT)
            _, said = life.communicate()
        checkpoints = ft.Checkpointer(folder)
        assert {1, 2} <= {*checkpoints.steps()}, said
        assert checkpoints.verify() == {}
        assert all(len(name) == 12 or name == ".functrain-lock" for name in os.listdir(folder))


# A file is closed only by its collection if Ctrl-C comes as its `with` statement begins or ends.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_ctrl_c_in_the_midst_of_save_leaves_the_one_before_and_nothing_else(
    tmp_path, ctrl_c
) -> None:
    like = {"x": np.zeros(3_000_000)}
    ft.save(tmp_path / "c", like)
    interrupted = 0
    for delay in (0.001, 0.005, 0.01, 0.02, 0.03, 0.05):
        timer = threading.Timer(delay, os.kill, [os.getpid(), signal.SIGINT])
        try:
            timer.start()
            ft.save(tmp_path / "c", {"x": np.ones(3_000_000)}, overwrite=True)
            timer.join()
            time.sleep(0.1)
        except KeyboardInterrupt:
            interrupted += 1
        timer.join()
        assert np.ptp(ft.load(tmp_path / "c", like)["x"]) == 0
    assert interrupted
    ft.save(tmp_path / "c", like, overwrite=True)
    assert np.all(ft.load(tmp_path / "c", like)["x"] == 0)
    assert os.listdir(tmp_path) == ["c"]


def states(step: int) -> dict[str, Any]:
    mesh = jax.make_mesh((jax.device_count(),), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    n = 100_000
    return {
        "plain": jnp.full((n,), step, jnp.float32),
        "divided": jax.device_put(jnp.arange(n) + step, NamedSharding(mesh, PartitionSpec("data"))),
        "everywhere": jax.device_put(jnp.arange(n) + step, NamedSharding(mesh, PartitionSpec())),
        "half": jnp.full((n,), step, jnp.bfloat16),
        "nibbles": jnp.full((n,), step, jnp.uint4),
        "keys": jax.random.split(jax.random.key(step), 1000),
        "one": jnp.float32(step),
    }


def advance(state: Any) -> Any:
    def after(x: Any) -> Any:
        if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
            return jax.vmap(lambda key: jax.random.fold_in(key, 1))(x)
        return x + 1

    return jax.tree.map(after, state)


def test_arrays_donated_right_after_save_are_saved_as_they_were(tmp_path) -> None:
    program = jax.jit(advance, donate_argnums=0)
    checkpoints = ft.Checkpointer(tmp_path, keep=None)
    expected = {}
    for step in range(5):
        state = states(step)
        expected[step] = digest(states(step))
        checkpoints.save(state, step, documents={"x": jnp.full(9, step)}, wait=False)
        for _ in range(3):
            state = program(state)
    checkpoints.close()
    for step, one in expected.items():
        assert digest(checkpoints.restore(states(step), step).state) == one


def test_arrays_of_numpy_changed_right_after_save_are_saved_as_they_were(tmp_path) -> None:
    state, document = {"x": np.zeros(500_000), "y": np.zeros(3, ">f4")}, {"x": np.zeros(50_000)}
    with ft.Checkpointer(tmp_path, keep=None) as checkpoints:
        for step in range(5):
            checkpoints.save(state, step, documents={"d": document}, wait=False)
            for x in (*state.values(), *document.values()):
                x += 1
        for step in checkpoints.steps():
            found = checkpoints.restore(state, step)
            leaves = [*found.state.values(), found.documents["d"]["x"]]
            assert all(np.all(x == step) for x in leaves)
