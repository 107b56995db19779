"""Two processes with two devices each: they save and end together, and resume as they like."""

import os
import pathlib
import signal
import textwrap

import pytest

from tests.several_processes import TRAINING, lines_starting, outputs, start, train


@pytest.mark.long
def test_sigterm_to_one_process_ends_all_at_one_step_and_they_go_on_to_the_same_bits(
    tmp_path: pathlib.Path,
) -> None:
    straight = train(2, tmp_path / "straight", 30)
    assert len(set(lines_starting(straight, "ends"))) == 1
    epochs = [sum(line.startswith("epoch") for line in lines) for lines in straight]
    assert epochs == [30, 0]  # the first tells

    killed = start(2, [TRAINING], str(tmp_path / "killed"), "30")
    assert killed[0].stdout is not None
    for line in killed[0].stdout:
        if line == "step 12\n":
            killed[1].send_signal(signal.SIGTERM)
            break
    steps = [
        [line for line in lines if line.startswith("step ")][-1]
        for lines in outputs(killed, code=143)
    ]
    assert steps[0] == steps[1]
    last = int(steps[0].removeprefix("step "))
    assert 12 < last < 240
    assert (tmp_path / "killed" / f"{last:012d}").is_dir()

    # One process with four devices has the same state; epochs that are over leave it as it is.
    one = start(1, [TRAINING], str(tmp_path / "killed"), "1")
    (begins,) = lines_starting(outputs(one, code=1), "begins")
    resumed = train(2, tmp_path / "killed", 30)
    assert lines_starting(resumed, "begins") == [begins, begins]
    assert begins.startswith(f"begins {last} ")
    for words in ("ends", "losses"):
        assert lines_starting(resumed, words) == lines_starting(straight, words)
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

    def prints(act):
        def act_and_print(*args, **kwargs):
            try:
                result = act(*args, **kwargs)
            except Exception as error:
                print(type(error).__name__, str(error).splitlines()[0].replace(folder, "."))
            else:
                print("done", result)
        return act_and_print

    def values(state):
        shards = [np.asarray(s.data, np.float32) for s in state["w"].addressable_shards]
        return np.unique(shards).tolist(), state["local"].tolist(), state["w"].sharding == rows

    prints(ft.save)(f"{folder}/one", make(1))
    print(values(ft.load(f"{folder}/one", make(0))))
    prints(ft.save)(f"{folder}/one", make(2))
    prints(ft.save)(f"{folder}/one", make(3), overwrite=True)
    print(values(ft.load(f"{folder}/one", make(0))))
    prints(ft.save)(f"{folder}/small", make(1, jnp.float8_e4m3fn))

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
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            restored = checkpoints.restore(make(0))
        print(values(restored.state), restored.position.step, len(caught))
        checkpoints.rollback(1)
        print(checkpoints.steps(), checkpoints.best())

    number = jax.process_index()
    with ft.Checkpointer(f"{folder}/run") as checkpoints:
        prints(checkpoints.save)(make(9), 9 + number)
        prints(checkpoints.save)({**make(9), "more": np.ones(2 + number)}, 9)
        prints(checkpoints.save)({**make(9), "text": "some" if number else np.ones(2)}, 9)
        prints(checkpoints.save)(make(9), 9, documents={"odd": object() if number else 1})
        prints(checkpoints.save)(make(9), 1 - number)
        prints(checkpoints.restore)(make(0, jnp.float32 if number else jnp.bfloat16))
        prints(checkpoints.restore)(make(0), 1 + number)
        prints(ft.load)(f"{folder}/one{number or ''}", make(0))
        print(checkpoints.steps())
    with ft.Checkpointer(f"{folder}/run{number}") as checkpoints:
        prints(checkpoints.save)(make(9), 9)
        prints(checkpoints.restore)(make(0))

    from functrain.checkpoint import _arrays, _checkpoint

    real = _checkpoint.write_arrays

    def full(path, leaves):
        raise OSError("the disk is full")

    with ft.Checkpointer(f"{folder}/run") as checkpoints:
        for failing in (0, 1):
            _checkpoint.write_arrays = full if number == failing else real
            prints(checkpoints.save)(make(3), 3)
        _checkpoint.write_arrays = real
        pictures = [] if number else [np.ones(2)]  # of a logger, which only the first process has
        prints(checkpoints.save)(make(4), 4, documents={"logger": pictures})
        print(checkpoints.steps())

    real_read = _arrays.StoredArrays._read_shard

    def read(self, *args):
        if number:
            raise OSError("gone")
        return real_read(self, *args)

    _arrays.StoredArrays._read_shard = read
    prints(ft.load)(f"{folder}/one", make(0))
    _arrays.StoredArrays._read_shard = real_read
    print(values(ft.load(f"{folder}/one", make(0))))

    def fit(**when):
        checkpoints = ft.Checkpointer(f"{folder}/clock", **when)
        ft.fit(make(0), lambda s, x: (s, {}), [jnp.ones(4)], checkpointer=checkpoints, verbose=0)

    prints(fit)(every=ft.every(seconds=1))
    batch = (np.ones((4, 3)),) * (1 + number)
    prints(ft.fit)(make(0), lambda s, x: (s, {}), [batch], sharding=rows, verbose=0)
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
    first, second = outputs(start(2, program, str(tmp_path)))
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
    printed = outputs(start(2, ["-c", textwrap.dedent(APART)], str(tmp_path)))
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
    for lines in outputs(start(2, ["-c", textwrap.dedent(STALE)], str(tmp_path))):
        found = [line for line in lines if line.startswith("found")]
        assert found == ["found False", "found 1", "found 1", "found None"]
