"""`python -m functrain.checkpoint`: what it shows, and what it ends with."""

import os
import pathlib
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import functrain as ft
from functrain.checkpoint import __main__, _storage
from functrain.checkpoint.__main__ import differences, main


def create(value, dtype=jnp.float32):
    return ft.TrainState.create(
        params={"dense": {"kernel": jnp.full((3, 4), value, dtype)}},
        tx=optax.sgd(0.1, momentum=0.9),
        rng=jax.random.key(0),
    )


@pytest.fixture
def run(tmp_path):
    """Three checkpoints; that of step 20 is the best."""
    with ft.Checkpointer(tmp_path / "run") as checkpoints:
        for step, loss in ((10, 0.5), (20, 0.25), (1200, float("nan"))):
            at = ft.Position(step, step // 10, batch=7 * (step == 1200))
            values = {"val_loss": loss, "val_accuracy": 1 - loss, "score": 3.0}
            checkpoints.save(create(float(step)), at, values=values)
    return tmp_path / "run"


def test_a_directory_is_listed_as_a_table_that_fits_a_terminal(run, capsys) -> None:
    assert main([str(run)]) == 0
    head, titles, *rows, note = capsys.readouterr().out.splitlines()
    assert head.endswith("run: 3 checkpoints")
    assert titles.split()[:5] == ["step", "epoch", "saved", "(UTC)", "size"]
    assert titles.split()[5:] == ["val_loss", "val_accuracy", "score"]
    assert [row.split()[0] for row in rows] == ["10", "20", "1,200"]
    assert "120, batch 7" in rows[2]
    assert [row.split()[-3:] for row in rows] == [
        ["0.5", "0.5", "3"],
        ["0.25*", "0.75*", "3"],
        ["nan", "nan", "3"],
    ]
    assert note == "* the best value"
    assert max(map(len, [titles, *rows])) <= 80
    assert len({len(row.rstrip()) for row in rows} | {len(titles.rstrip())}) == 1  # aligned


def test_epochs_that_are_over_are_counted(tmp_path, capsys) -> None:
    data = [np.ones(2, np.float32)] * 4
    checkpointer = ft.Checkpointer(tmp_path, every=ft.every(steps=3))

    def step(state, batch):
        return {"w": state["w"] + batch.sum()}, {}

    ft.fit({"w": jnp.zeros(())}, step, data, epochs=2, checkpointer=checkpointer, verbose=0)
    assert main([str(tmp_path)]) == 0
    rows = capsys.readouterr().out.splitlines()[2:]
    found = [row.split("  20")[0].split(maxsplit=1) for row in rows]
    assert [[each.strip() for each in row] for row in found] == [
        ["3", "0, batch 3"],
        ["6", "1, batch 2"],
        ["8", "2"],
    ]


def test_values_for_which_there_is_no_room_are_named(tmp_path, capsys) -> None:
    values = {f"val_some_long_name_{i}": 0.5 for i in range(9)}
    with ft.Checkpointer(tmp_path / "run") as checkpoints:
        checkpoints.save(create(1.0), 1, values=values)
    assert main([str(tmp_path / "run")]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines[1:3])) <= 80
    assert "Not shown: val_some_long_name_1, val_some" in lines[3]
    assert "and 2 more" in lines[3]


def test_one_checkpoint_says_what_it_is(run, tmp_path, capsys) -> None:
    assert main([str(run / f"{20:012d}")]) == 0
    text = capsys.readouterr().out
    for line in ("step          20, epoch 2", "state         4 leaves", "val_loss      0.25"):
        assert f"  {line}\n" in text
    ft.save(tmp_path / "single", create(1.0))
    assert main([str(tmp_path / "single")]) == 0
    assert f"jax        {jax.__version__}" in capsys.readouterr().out


def flip(directory):
    """Flips bits of the last leaves."""
    path = pathlib.Path(directory, "arrays-0.safetensors")
    data = bytearray(path.read_bytes())
    data[-50:] = (byte ^ 1 for byte in data[-50:])
    path.write_bytes(data)


def test_verify_reads_every_byte(run, capsys) -> None:
    assert main([str(run), "--verify"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[:2] for line in lines] == [
        [f"{step:012d}", "intact,"] for step in (10, 20, 1200)
    ]
    flip(run / f"{20:012d}")
    assert main([str(run), "--verify"]) == 1
    out = capsys.readouterr().out
    assert f"{20:012d}  damaged\n" in out
    assert f"{20:012d}: its bytes are not those that were saved" in out
    assert out.endswith("1 of 3 damaged.\n")
    assert f"{1200:012d}  intact" in out


def test_a_checkpoint_that_says_nothing_of_itself_is_listed_as_damaged(run, capsys) -> None:
    (run / f"{20:012d}" / "checkpoint.json").write_text("{}")
    assert main([str(run)]) == 0
    out = capsys.readouterr().out
    assert "Damaged: 20. --verify tells what is wrong with them." in out
    assert main([str(run / f"{20:012d}")]) == 1
    assert "expected the manifest of a checkpoint" in capsys.readouterr().err


def test_two_checkpoints_of_one_state_are_the_same(run, tmp_path, capsys) -> None:
    ft.save(tmp_path / "single", create(1200.0))
    assert main([str(run), str(tmp_path / "single")]) == 0
    assert "All 4 leaves are the same, bit for bit." in capsys.readouterr().out


def test_leaves_that_differ_are_named_with_by_how_much(tmp_path, capsys) -> None:
    one = {
        **{"same": jnp.ones(3), "nan": jnp.array([jnp.nan]), "gone": jnp.ones(1)},
        **{"w": jnp.ones((2, 3)), "n": jnp.arange(3), "flag": jnp.array([True, False])},
        **{"inf": jnp.array([jnp.inf, 1.0]), "zero": jnp.array([0.0]), "shape": jnp.ones(2)},
        "key": jax.random.key(0),
    }
    two = {
        **{**one, "new": jnp.ones(1)},
        **{"w": one["w"].at[1, 2].add(0.5), "n": jnp.array([0, 9, 2]), "flag": jnp.ones(2, bool)},
        **{"inf": jnp.array([jnp.inf, 2.0]), "zero": jnp.array([-0.0]), "shape": jnp.ones(3)},
        "key": jax.random.key(1),
    }
    del two["gone"]
    ft.save(tmp_path / "one", one)
    ft.save(tmp_path / "two", two)
    found, count = differences(str(tmp_path / "one"), str(tmp_path / "two"))
    assert count == 11
    assert {x.name: (x.description, x.largest) for x in found} == {
        "w": ("1 of 6 elements", 0.5),
        "n": ("1 of 3 elements", 8.0),
        "key": ("key<fry>[], other keys", None),
        "flag": ("1 of 2 elements", None),
        "shape": ("float32[2] and float32[3]", None),
        "gone": ("float32[1], first only", None),
        "new": ("float32[1], second only", None),
        "inf": ("1 of 2 elements", 1.0),
        "zero": ("1 of 1 elements", 0.0),
    }
    assert main([str(tmp_path / "one"), str(tmp_path / "two")]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert lines[-1] == "9 of 11 leaves differ."
    assert max(map(len, lines)) <= 80


def test_many_long_names_stay_within_a_terminal(tmp_path, capsys) -> None:
    tree = {f"block_{'x' * 80}_{i}": jnp.full(2, 1e-30 * i) for i in range(60)}
    ft.save(tmp_path / "one", tree)
    ft.save(tmp_path / "two", jax.tree.map(lambda x: x + 1, tree))
    assert main([str(tmp_path / "one"), str(tmp_path / "two")]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= 80
    assert "  ... and 20 more" in lines


def test_half_precision_and_bits_that_flipped_on_disk_in_a_comparison(tmp_path, capsys) -> None:
    for name, value in (("one", 1.0), ("two", 1.5)):
        ft.save(tmp_path / name, create(value, jnp.bfloat16))
    (found,) = differences(str(tmp_path / "one"), str(tmp_path / "two"))[0]
    assert found.description == "12 of 12 elements"
    assert np.isclose(found.largest, 0.5)
    flip(tmp_path / "two")
    assert main([str(tmp_path / "one"), str(tmp_path / "two")]) == 1
    assert "two: its bytes are not those that were saved" in capsys.readouterr().err


@pytest.mark.parametrize("arguments", [["nothing"], ["file"], ["folder"], ["nothing", "--verify"]])
def test_what_is_no_checkpoint_is_said_in_a_line(tmp_path, monkeypatch, capsys, arguments) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").write_text("text")
    (tmp_path / "folder").mkdir()
    assert main(arguments) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err.count("\n") == 1
    assert "expected a" in printed.err


@pytest.mark.parametrize(
    ("options", "module", "name", "step"),
    [
        ([], __main__, "read_manifest", 1),
        ([], __main__, "read_manifest", 2),
        (["--verify"], _storage, "verify", 1),
        (["--verify"], _storage, "verify", 2),
        (["."], __main__, "differences", 1),
    ],
)
def test_a_checkpoint_that_is_replaced_or_removed_meanwhile_is_not_called_damaged(
    tmp_path, monkeypatch, capsys, options, module, name, step
) -> None:
    monkeypatch.chdir(tmp_path)
    read, later = getattr(module, name), [create(2.0)]
    with ft.Checkpointer(".", keep=1) as checkpoints:
        checkpoints.save(create(1.0), 1)

        def read_too_late(*arguments):
            if not later:
                return read(*arguments)
            checkpoints.save(later.pop(), step)
            raise ft.CheckpointCorruptError("the files that were listed are gone")

        monkeypatch.setattr(module, name, read_too_late)
        assert main([".", *options]) == 0
    printed = capsys.readouterr()
    assert "amaged" not in printed.out
    assert printed.err == ""


def test_the_command_runs_in_a_process_of_its_own_and_ends_with_its_status(run) -> None:
    def status(*arguments):
        command = [sys.executable, "-W", "error", "-m", "functrain.checkpoint", *arguments]
        env = {**os.environ, "JAX_PLATFORMS": "cuda"}  # not asked for: nothing runs on a device
        done = subprocess.run(command, cwd=run.parent, env=env, capture_output=True, text=True)
        return done.returncode, done.stdout, done.stderr

    code, out, err = status("run", "--verify")
    assert (code, err) == (0, "")
    assert out.count("intact, ") == 3
    flip(run / f"{1200:012d}")
    assert status("run", "--verify")[0] == 1
    refused = "nothing: expected a directory of checkpoints, got nothing. Check the path.\n"
    assert status("nothing") == (2, "", f"{run.parent}/{refused}")
