"""Two processes with two devices each: they save together, end together, and go on as they like."""

import os
import pathlib
import signal
import socket
import subprocess
import sys
import textwrap

import numpy as np
import pytest

import functrain as ft
from tests import fork_server

HERE = pathlib.Path(__file__).parent
ROOT = str(HERE.parent.parent)


def start(
    processes: int,
    program: list[str],
    *arguments: str,
    popen: type[subprocess.Popen[str]] = fork_server.Popen,
) -> list[subprocess.Popen[str]]:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{free.getsockname()[1]}"
    known = {"JAX_COORDINATOR_ADDRESS": address, "JAX_NUM_PROCESSES": str(processes)}
    return [
        popen(
            [sys.executable, *program, *arguments],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            cwd=ROOT,
            env={**os.environ, **known, "JAX_PROCESS_ID": str(number), "PYTHONPATH": ROOT},
        )
        for number in range(processes)
    ]


def ended(started: list[subprocess.Popen[str]], code: int = 0) -> list[list[str]]:
    """Returns what each process printed, line by line."""
    done = [(process.communicate(timeout=180), process.returncode) for process in started]
    assert [found for _, found in done] == [code] * len(done), [err[-3000:] for (_, err), _ in done]
    printed = (out.splitlines() for (out, _), _ in done)
    return [[line for line in lines if "peer ranks" not in line] for lines in printed]


def said(printed: list[list[str]], begin: str) -> list[str]:
    """Returns the line of each process that begins so; C++ libraries print others between."""
    return [next(line for line in lines if line.startswith(begin)) for lines in printed]


def train(processes: int, directory: pathlib.Path, epochs: int) -> list[list[str]]:
    program = [str(HERE / "processes.py")]
    return ended(start(processes, program, str(directory), str(epochs)))


@pytest.mark.long
def test_sigterm_to_one_process_ends_all_at_one_step_and_they_go_on_to_the_same_bits(
    tmp_path: pathlib.Path,
) -> None:
    straight = train(2, tmp_path / "straight", 30)
    assert len(set(said(straight, "ends"))) == 1
    epochs = [sum(line.startswith("epoch") for line in lines) for lines in straight]
    assert epochs == [30, 0]  # the first tells

    killed = start(2, [str(HERE / "processes.py")], str(tmp_path / "killed"), "30")
    assert killed[0].stdout is not None
    for line in killed[0].stdout:
        if line == "step 12\n":
            killed[1].send_signal(signal.SIGTERM)
            break
    steps = [
        [line for line in lines if line.startswith("step ")][-1]
        for lines in ended(killed, code=143)
    ]
    assert steps[0] == steps[1]
    last = int(steps[0].removeprefix("step "))
    assert 12 < last < 240
    assert (tmp_path / "killed" / f"{last:012d}").is_dir()

    # One process with four devices has the same state; epochs that are over leave it as it is.
    one = start(1, [str(HERE / "processes.py")], str(tmp_path / "killed"), "1")
    (begins,) = said(ended(one, code=1), "begins")
    resumed = train(2, tmp_path / "killed", 30)
    assert said(resumed, "begins") == [begins, begins]
    assert begins.startswith(f"begins {last} ")
    for words in ("ends", "losses"):
        assert said(resumed, words) == said(straight, words)
    rows = [(tmp_path / f"{name}.csv").read_text() for name in ("straight", "killed")]
    assert rows[0] == rows[1]
    assert rows[0].count("\n") == 81


TOGETHER = """
    import os, pathlib, sys, warnings
    folder = sys.argv[1]
    os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=2"
    import jax, jax.numpy as jnp, numpy as np, functrain as ft
    from jax.experimental import multihost_utils

    ft.distributed.initialize()
    mesh = ft.sharding.mesh({"data": 4})
    rows = jax.NamedSharding(mesh, jax.P("data"))

    def make(value, dtype=jnp.bfloat16):
        return {
            "w": jax.jit(lambda: jnp.full((8, 3), value, dtype), out_shardings=rows)(),
            "local": np.full(3, value),
        }

    def said(what):
        def say(*args, **kwargs):
            try:
                found = what(*args, **kwargs)
            except Exception as error:
                print(type(error).__name__, str(error).splitlines()[0].replace(folder, "."))
            else:
                print("done", found)
        return say

    def values(state):
        own = [np.asarray(s.data, np.float32) for s in state["w"].addressable_shards]
        return np.unique(own).tolist(), state["local"].tolist(), state["w"].sharding == rows

    said(ft.save)(f"{folder}/one", make(1))
    print(values(ft.load(f"{folder}/one", make(0))))
    said(ft.save)(f"{folder}/one", make(2))
    said(ft.save)(f"{folder}/one", make(3), overwrite=True)
    print(values(ft.load(f"{folder}/one", make(0))))
    said(ft.save)(f"{folder}/small", make(1, jnp.float8_e4m3fn))

    with ft.Checkpointer(f"{folder}/run", monitor="loss") as checkpoints:
        for step in (1, 2):
            checkpoints.save(make(step), step, values={"loss": step})
        assert checkpoints.verify() == {}
        multihost_utils.sync_global_devices("looked")
        if jax.process_index() == 0:
            for path in pathlib.Path(folder, "run", f"{2:012d}").rglob("*"):
                if path.suffix == ".safetensors":
                    path.write_bytes(path.read_bytes()[::-1])
        multihost_utils.sync_global_devices("damaged")
        with warnings.catch_warnings(record=True) as found:
            warnings.simplefilter("always")
            restored = checkpoints.restore(make(0))
        print(values(restored.state), restored.position.step, len(found))
        checkpoints.rollback(1)
        print(checkpoints.steps(), checkpoints.best())

    own = jax.process_index()
    with ft.Checkpointer(f"{folder}/run") as checkpoints:
        said(checkpoints.save)(make(9), 9 + own)
        said(checkpoints.save)({**make(9), "more": np.ones(2 + own)}, 9)
        said(checkpoints.save)({**make(9), "text": "some" if own else np.ones(2)}, 9)
        said(checkpoints.save)(make(9), 9, documents={"odd": object() if own else 1})
        said(checkpoints.save)(make(9), 1 - own)
        said(checkpoints.restore)(make(0, jnp.float32 if own else jnp.bfloat16))
        said(checkpoints.restore)(make(0), 1 + own)
        said(ft.load)(f"{folder}/one{own or ''}", make(0))
        print(checkpoints.steps())
    with ft.Checkpointer(f"{folder}/run{own}") as checkpoints:
        said(checkpoints.save)(make(9), 9)
        said(checkpoints.restore)(make(0))

    from functrain.checkpoint import _arrays, _checkpoint

    real = _checkpoint.write_arrays

    def full(path, leaves):
        raise OSError("the disk is full")

    with ft.Checkpointer(f"{folder}/run") as checkpoints:
        for failing in (0, 1):
            _checkpoint.write_arrays = full if own == failing else real
            said(checkpoints.save)(make(3), 3)
        _checkpoint.write_arrays = real
        pictures = [] if own else [np.ones(2)]  # of a logger, which only the first process has
        said(checkpoints.save)(make(4), 4, documents={"logger": pictures})
        print(checkpoints.steps())

    real_read = _arrays.StoredArrays._read_shard

    def read(self, *args):
        if own:
            raise OSError("gone")
        return real_read(self, *args)

    _arrays.StoredArrays._read_shard = read
    said(ft.load)(f"{folder}/one", make(0))
    _arrays.StoredArrays._read_shard = real_read
    print(values(ft.load(f"{folder}/one", make(0))))

    def fit(**when):
        checkpoints = ft.Checkpointer(f"{folder}/clock", **when)
        ft.fit(make(0), lambda s, x: (s, {}), [jnp.ones(4)], checkpointer=checkpoints, verbose=0)

    said(fit)(every=ft.every(seconds=1))
    batch = (np.ones((4, 3)),) * (1 + own)
    said(ft.fit)(make(0), lambda s, x: (s, {}), [batch], sharding=rows, verbose=0)
"""


DISAGREEING = [  # what process 1 says, which does another thing than the first
    "ValueError ./run/000000000010: expected the same path and step in all processes",
    "ValueError ./run/000000000009: expected a state of the same leaves in all processes",
    "TypeError text: expected an array of numbers with values, got str.",
    "TypeError documents/odd: expected dicts, lists and tuples of numbers",
    "ValueError ./run: expected a step after 1, the step of the last checkpoint, got 0.",
    "CheckpointMismatchError ./run/000000000001: expected a checkpoint with the leaves of",
    "FileNotFoundError ./run/000000000002: expected a checkpoint, got nothing.",
    "FileNotFoundError ./one1: expected a checkpoint, got nothing.",
    "[1]",
    "ValueError ./run1/000000000009: expected the same path and step in all processes",
    "ValueError ./run1: expected the same path and step in all processes",
]


def test_what_one_process_can_do_with_checkpoints_several_can(tmp_path: pathlib.Path) -> None:
    program = ["-c", textwrap.dedent(TOGETHER)]
    first, second = ended(start(2, program, str(tmp_path)))
    assert first[:2] == ["done None", "([1.0], [1, 1, 1], True)"]
    assert first[2].startswith("FileExistsError ./one: expected no such path, or an earlier")
    assert second[2].startswith("OtherProcessError process 0 failed: FileExistsError")
    assert first[3:5] == ["done None", "([3.0], [3, 3, 3], True)"]
    assert first[5] == "done None"
    assert first[6:8] == ["([1.0], [1, 1, 1], True) 1 1", "[1] 1"]
    for line, told, failed in zip(DISAGREEING, first[8:19], second[8:19], strict=True):
        kind, _, message = line.partition(" ")
        assert failed.startswith(line)
        assert told.startswith((line, f"OtherProcessError process 1 failed: {kind}: {message}"))
    full = "OSError the disk is full"
    others = [f"OtherProcessError process {n} failed: OSError: the disk is full" for n in (0, 1)]
    assert (first[19:21], second[19:21]) == ([full, others[1]], [others[0], full])
    assert first[21:23] == ["done None", "[1, 4]"]
    assert second[23].startswith("CheckpointCorruptError ./one: expected the bytes of")
    assert first[23].startswith("OtherProcessError process 1 failed: CheckpointCorruptError: ./one")
    assert first[24] == "([3.0], [3, 3, 3], True)"
    assert first[25] == "done None"
    assert first[26].startswith("ValueError data: expected the same batches in every process")
    differing = (2, *range(8, 21), 23)  # who failed, and who was told
    same = [[line for i, line in enumerate(x) if i not in differing] for x in (first, second)]
    assert same[0] == same[1]
    assert sorted(os.listdir(tmp_path)) == ["clock", "one", "run", "run0", "small"]


WHENEVER = """
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
    program = ["-c", WHENEVER]
    first, second = said(ended(start(2, program, str(tmp_path / "run"), "clock")), "ends")
    assert first == second
    assert first.startswith("ends 120.0 [")
    assert first.count(",") > 2  # 60 chunks of 30 ms each, and 0.4 s between saves
    steps = [int(x) for x in first.partition("[")[2].rstrip("]").split(",")]
    for checkpoint in steps:
        assert float(ft.load(tmp_path / "run" / f"{checkpoint:012d}", np.float32(0))) == checkpoint


@pytest.mark.parametrize("asked", [0, 1])
def test_a_signal_to_one_process_saves_in_all_which_go_on(
    tmp_path: pathlib.Path, asked: int
) -> None:
    started = start(2, ["-c", WHENEVER], str(tmp_path / "run"), "signal")
    stream = started[asked].stdout
    assert stream is not None
    for line in stream:
        if line in ("step 20\n", "step 60\n"):
            started[asked].send_signal(signal.SIGUSR1)
        if line.startswith("step 90"):
            break
    first, second = said(ended(started), "ends")
    assert first == second
    steps = [int(x) for x in first.partition("[")[2].rstrip("]").split(",")]
    assert len(steps) == 3
    assert 20 <= steps[0] < 60 <= steps[1] < 120 == steps[2]


APART = """
    import os, sys
    os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=2"
    import jax, jax.numpy as jnp, numpy as np, functrain as ft
    from functrain.checkpoint import _arrays

    folder = sys.argv[1]
    ft.distributed.initialize()
    devices = {"all": jax.devices(), "first": jax.devices()[:2]}
    meshes = {name: ft.sharding.mesh({"data": -1}, devices=x) for name, x in devices.items()}

    def make(value):
        state = {"own": jax.device_put(jnp.full(3, value), jax.local_devices()[0])}
        for name, mesh in meshes.items():
            for axis in ("data", None):
                where = jax.NamedSharding(mesh, jax.P(axis))
                program = jax.jit(lambda: jnp.full((8, 3), value), out_shardings=where)
                state[f"{name} {axis}"] = program()
        return state

    reads = []
    real = _arrays.StoredArrays.read
    _arrays.StoredArrays.read = lambda *args: (reads.append(args[1]), real(*args))[1]
    ft.save(f"{folder}/state", make(1))
    found = ft.load(f"{folder}/state", make(0))
    for name, x in found.items():
        same = [bool((shard.data == 1).all()) for shard in x.addressable_shards]
        print(name, len(same), all(same), reads.count(f"state/{name}"))
    x = make(1)["all data"] if jax.process_index() else np.ones((8, 3), np.int32)
    try:
        ft.save(f"{folder}/other", {"x": x})
    except (RuntimeError, ValueError) as error:
        print("refused", "x: expected parts of the processes" in str(error))
"""


def test_what_is_on_devices_of_the_first_process_is_saved_and_each_piece_is_read_once(
    tmp_path: pathlib.Path,
) -> None:
    printed = ended(start(2, ["-c", textwrap.dedent(APART)], str(tmp_path)))
    everywhere = ["own 1 True 1", "all data 2 True 2", "all None 2 True 1"]
    here = ["first data 2 True 1", "first None 2 True 1"]
    there = ["first data 0 True 0", "first None 0 True 1"]
    for lines, parts in zip(printed, (here, there), strict=True):
        assert {*lines} >= {*everywhere, *parts, "refused True"}
    assert os.listdir(tmp_path) == ["state"]


STALE = """
    import os, sys, time
    import jax, numpy as np, functrain as ft
    from functrain.checkpoint import _directory

    ft.distributed.initialize()
    real, until = _directory.steps, 0.0

    def steps(directory):
        is_stale = jax.process_index() and time.monotonic() < until
        return [] if is_stale else real(directory)

    _directory.steps = steps
    state = {"x": np.ones(3)}
    with ft.Checkpointer(sys.argv[1], monitor="loss") as checkpoints:
        checkpoints.save(state, 1, values={"loss": 1.0})
        for act in (
            lambda: checkpoints._is_improved({"loss": 2.0}),
            lambda: checkpoints.restore(state).position.step,
            lambda: checkpoints.restore(state, 1).position.step,
            lambda: checkpoints.rollback(1),
        ):
            until = time.monotonic() + 0.5
            print("found", act())
"""


def test_a_process_that_sees_a_checkpoint_late_does_as_the_first_one(
    tmp_path: pathlib.Path,
) -> None:
    for lines in ended(start(2, ["-c", textwrap.dedent(STALE)], str(tmp_path))):
        found = [line for line in lines if line.startswith("found")]
        assert found == ["found False", "found 1", "found 1", "found None"]


LOADING = """
import os, pathlib, sys, time, jax, jax.numpy as jnp, safetensors, functrain as ft

directory, size, shards, leaves = sys.argv[1], int(sys.argv[2]), 8, 4
status = pathlib.Path("/proc/self/status")

def mib(name):
    return int(status.read_text().split(name + ":")[1].split()[0]) / 2**10

def peak(act):
    before = mib("VmRSS")
    pathlib.Path("/proc/self/clear_refs").write_text("5")
    start = time.perf_counter()
    result = act()
    return result, (mib("VmHWM") - before) / size, time.perf_counter() - start

os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=1"
ft.distributed.initialize()
mesh = ft.sharding.mesh({"data": 2})
rows = size * 2**20 // 4 // (shards * leaves) // 1024
names = [f"layers.{i}.{j}.weight" for i in range(shards) for j in range(leaves)]
rule = ft.Rename("layers.*.*.weight", "layers_*/*/kernel", "o i -> i o")
# Half of the leaves are divided along the rows of the file, half along its columns.
def like(j):
    spec = jax.P(None, "data") if j % 2 else jax.P("data")
    return jax.ShapeDtypeStruct((1024, rows), jnp.float32, sharding=jax.NamedSharding(mesh, spec))
state = {f"layers_{i}": {str(j): {"kernel": like(j)} for j in range(leaves)} for i in range(shards)}
warm, taken, seconds = peak(lambda: ft.warm_start(state, directory, rename=[rule]))
assert warm.missing == () and len(warm.loaded) == shards * leaves

def by_library():
    parts = []
    for file in sorted(pathlib.Path(directory).glob("*.safetensors")):
        with safetensors.safe_open(file, "numpy") as arrays:
            for name in arrays.keys():
                half = slice(jax.process_index() * 512, (jax.process_index() + 1) * 512)
                part = arrays.get_slice(name)[:, half].T
                parts.append(jax.device_put(part, jax.local_devices()[0]))
    return jax.block_until_ready(parts)

total = jax.jit(lambda tree: sum(jnp.sum(x) for x in jax.tree.leaves(tree)))
value = float(total(warm.state))
del warm
_, _, theirs = peak(by_library)
print("taken", taken, seconds, theirs, value)
"""


@pytest.mark.parametrize("size", [192, pytest.param(2048, marks=pytest.mark.long)])
def test_each_process_reads_its_parts_of_a_sharded_model(tmp_path: pathlib.Path, size: int) -> None:
    leaves = size * 2**20 // 4 // 32
    arrays = {
        f"layers.{i}.{j}.weight": np.full((leaves // 1024, 1024), i + 1, np.float32)
        for i in range(8)
        for j in range(4)
    }
    ft.export.params(tmp_path / "model.safetensors", arrays, shard_bytes=size * 2**20 // 8)
    assert len(list(tmp_path.glob("*.safetensors"))) == 8
    for line in said(ended(start(2, ["-c", LOADING], str(tmp_path), str(size))), "taken"):
        taken, _, _, total = map(float, line.split()[1:])
        # In models: the half that a process has, and two leaves of it while they are transposed.
        assert taken < 0.5 + 2 / 32 + 24 / size
        assert total == sum(float(x.sum()) for x in arrays.values())
