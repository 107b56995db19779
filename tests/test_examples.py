"""Every example runs on a small setting, draws its picture, and says in a line what it lacks.

The site runs all of them; but for one, what they print is looked at by the long tests only.
"""

import os
import pathlib
import random
import signal
import subprocess
import sys
import time
from importlib.util import find_spec
from typing import Any

import jax
import numpy as np
import optax
import pytest
from safetensors.numpy import load_file

from tests import fork_server

EXAMPLES = pathlib.Path(__file__).parents[1] / "examples"
SCRIPTS = sorted(path.name for path in EXAMPLES.glob("[a-z]*.py"))
WITHOUT_HUB = [script for script in SCRIPTS if script != "finetune.py"]
WITHOUT = (
    "import runpy, sys; sys.modules[sys.argv[1]] = None; sys.argv = sys.argv[2:]; "
    "sys.path[0] = sys.argv[0].rpartition('/')[0]; runpy.run_path(sys.argv[0])"
)


def start(*arguments: object, **environment: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, *map(str, arguments)]
    env = os.environ | environment
    return subprocess.run(command, capture_output=True, text=True, timeout=300, env=env)


def run(*arguments: object) -> str:
    done = start(*arguments)
    assert done.returncode == 0, done.stderr
    return done.stdout


def quick(script: str, folder: pathlib.Path) -> list[str]:
    return run(EXAMPLES / script, "--quick", "--output", folder).splitlines()


def number(lines: list[str], begin: str, after: str) -> float:
    """Returns the number behind a word, in the line that begins so."""
    (line,) = (line for line in lines if line.startswith(begin))
    return float(line.split(f"{after} ")[1].split()[0].strip(",:;"))


@pytest.mark.smoke
def test_mnist_trains_and_plain_keras_agrees(tmp_path) -> None:
    output = quick("mnist.py", tmp_path)
    ours, theirs = (line for line in output if line.startswith("test accuracy"))
    assert ours.split()[2] == theirs.split()[2]
    assert float(ours.split()[2]) > 0.8
    assert (tmp_path / "mnist.keras").exists()
    assert (tmp_path / "curves.png").exists()


@pytest.mark.long
@pytest.mark.parametrize("script", WITHOUT_HUB)
def test_every_example_draws_its_picture(script, tmp_path) -> None:
    quick(script, tmp_path)
    assert list(tmp_path.rglob("*.png"))


@pytest.mark.long
def test_a_training_killed_twice_ends_as_one_that_was_left_alone(tmp_path) -> None:
    output = quick("resume.py", tmp_path)
    assert sum(line.startswith("killed at step") for line in output) == 2
    assert any(line.startswith("resuming after") for line in output)
    assert [line.split()[-1] for line in output if "killed twice" in line] == ["equal"] * 3
    assert not any("NOT" in line for line in output)
    assert (tmp_path / "resume.png").exists()


@pytest.mark.long
def test_a_run_that_dies_hangs_and_is_preempted_ends_as_one_without_failure(tmp_path) -> None:
    output = quick("long_run.py", tmp_path)
    broken = output[: output.index("no failure:")]
    assert [line for line in broken if line.startswith("status")] == ["status 143", "status 0"]
    assert sum("restarting all processes" in line for line in broken) == 2
    assert "functrain.launch: process 1 ended with 137" in broken
    # The one that hangs or the one that waits for it, whichever watchdog is first.
    assert any(line.endswith("ended with 124") for line in broken)
    assert "equal: norm, loss, skipped, skipped_in_a_row, learning_rate" in output
    assert "skipped batches: 4 of 200" in output
    stacks = (tmp_path / "broken" / "printed.txt").read_text()
    assert " in hang" in stacks


@pytest.mark.long
def test_a_student_is_better_with_a_teacher_than_alone(tmp_path) -> None:
    output = quick("distillation.py", tmp_path)
    alone = number(output, "the student alone:", "accuracy")
    taught = number(output, "the student taught:", "accuracy")
    assert 0.8 < alone < taught < number(output, "the teacher:", "accuracy")
    assert (tmp_path / "distillation.png").exists()


@pytest.mark.long
def test_agents_that_were_killed_twice_are_those_of_one_run(tmp_path) -> None:
    output = quick("ppo.py", tmp_path)
    assert [line.split()[-1] for line in output[:2]] == ["equal", "equal"]
    assert "NOT" not in "".join(output[:2])
    # Agents that push at random hold the pole for 22 steps.
    assert number(output, "mean return", "tenth:") > 40
    assert (tmp_path / "ppo.png").exists()


@pytest.mark.long
def test_text_beats_the_bigram_model(tmp_path) -> None:
    output = run(EXAMPLES / "text.py", "--steps", 400, "--output", tmp_path).splitlines()
    assert "below the bigram model's" in output[-2]
    assert "not below" not in output[-2]


@pytest.mark.long
def test_mnist_in_full_reaches_its_accuracy(tmp_path) -> None:
    output = run(EXAMPLES / "mnist.py", "--output", tmp_path)
    accuracies = [float(li.split()[2]) for li in output.splitlines() if "test accuracy" in li]
    assert len(accuracies) == 2
    assert accuracies[0] == accuracies[1] >= 0.975


@pytest.mark.parametrize("script", SCRIPTS)
def test_every_example_explains_itself(script) -> None:
    assert "usage:" in run(EXAMPLES / script, "--help")


def assert_one_line(done: subprocess.CompletedProcess[str], *words: str) -> None:
    assert done.returncode == 1
    (line,) = done.stderr.splitlines()
    assert all(word in line for word in words), line


@pytest.mark.parametrize("script", SCRIPTS)
def test_another_backend_is_refused_in_a_line(script) -> None:
    done = start(EXAMPLES / script, "--quick", KERAS_BACKEND="torch")
    assert_one_line(done, script, "KERAS_BACKEND=torch", "KERAS_BACKEND=jax python")


def test_a_folder_that_cannot_be_written_is_named_in_a_line(tmp_path) -> None:
    taken = tmp_path / "taken"
    taken.touch()
    done = start(EXAMPLES / "mnist.py", "--quick", "--output", taken / "below")
    assert_one_line(done, str(taken / "below"), "--output")


@pytest.mark.parametrize(
    ("package", "script"), [("matplotlib", "mnist.py"), ("keras_hub", "finetune.py")]
)
def test_a_missing_package_is_named_in_a_line(package, script, tmp_path) -> None:
    done = start("-c", WITHOUT, package, EXAMPLES / script, "--quick", "--output", tmp_path)
    assert_one_line(done, script, package, "pip install")


@pytest.mark.long
def test_adapters_learn_what_their_base_does_not_know(tmp_path) -> None:
    output = quick("lora.py", tmp_path)
    (means,) = (line.split()[1:] for line in output if line.startswith("mean"))
    base, adapter, all_params = map(float, means)
    assert base < adapter < all_params
    assert number(output, "a file of eight adapters", "adapters:") < 0.5
    assert (tmp_path / "lora.png").exists()


@pytest.mark.long
def test_one_script_trains_alike_on_one_device_on_eight_and_on_two_processes(tmp_path) -> None:
    output = quick("several_hosts.py", tmp_path)
    for name in ("one device", "eight devices", "two processes of four"):
        assert number(output, f"{name}: accuracy", "accuracy") > 0.8
        assert number(output, f"{name}: accuracy", "within") < 0.01
    held = [line for line in output if "of 1.2 MiB" in line]
    assert len(held) == 3
    assert sum("each of 8 devices: 153.8 KiB" in line for line in held) == 2
    assert (tmp_path / "several_hosts.png").exists()


@pytest.mark.long
@pytest.mark.adapters
@pytest.mark.skipif(find_spec("keras_hub") is None, reason="needs keras_hub")
def test_a_language_model_is_fine_tuned_and_predicts_the_same_elsewhere(tmp_path) -> None:
    output = quick("finetune.py", tmp_path)
    base = number(output, "base:", "loss on Othello")
    for dtype in ("float32", "int8", "int4"):
        assert number(output, f"{dtype}: loss", "loss on Othello") < base + 0.1
    assert number(output, "logits here", "at most") < 1e-5
    assert (tmp_path / "finetune.png").exists()


def pretrain_until(checkpoints: int, folder: pathlib.Path) -> str:
    """Pretrains until there are so many checkpoints, and kills the process a moment later."""
    command = [sys.executable, str(EXAMPLES / "pretrain.py"), "--quick", "--output", str(folder)]
    process = fork_server.Popen(command, stdout=subprocess.PIPE, text=True, cwd=EXAMPLES.parent)
    while process.poll() is None:
        if len(list(folder.glob("checkpoints/*/checkpoint.json"))) >= checkpoints:
            time.sleep(random.uniform(0, 0.1))
            process.kill()
            break
        time.sleep(0.005)
    printed = process.communicate(timeout=300)[0]
    assert process.returncode == (0 if checkpoints > 10 else -signal.SIGKILL)
    return printed


def trained(folder: pathlib.Path) -> dict[str, bytes]:
    """Returns every array of the last checkpoint but the times."""
    (path,) = folder.glob("checkpoints/000000000060/*.safetensors")
    return {
        name: x.tobytes()
        for name, x in load_file(path).items()
        if "seconds" not in name and "throughput" not in name
    }


@pytest.mark.long
def test_a_pretraining_killed_twice_at_random_is_that_of_one_run(tmp_path) -> None:
    straight, killed = tmp_path / "straight", tmp_path / "killed"
    samples = pretrain_until(99, straight).partition("--- sample")[2]
    for checkpoints in (1, 3):
        pretrain_until(checkpoints, killed)
    printed = pretrain_until(99, killed)
    assert printed.count("resuming after") == 1
    expected, found = trained(straight), trained(killed)
    assert found == expected
    assert any("embedding" in name for name in found)
    assert any("history" in name for name in found)
    assert printed.partition("--- sample")[2] == samples.replace(str(straight), str(killed))


@pytest.fixture
def pretrain(monkeypatch, tmp_path) -> dict[str, Any]:
    """Returns the names of pretrain.py up to its model."""
    script = EXAMPLES / "pretrain.py"
    monkeypatch.setattr(sys, "argv", [str(script), "--quick", "--output", str(tmp_path)])
    monkeypatch.syspath_prepend(EXAMPLES)
    names: dict[str, Any] = {}
    exec(compile(script.read_text().partition("# %% The loss")[0], script.name, "exec"), names)
    return names


def test_packed_documents_have_the_loss_of_each_alone(pretrain) -> None:
    ft, grain = pretrain["ft"], pretrain["grain"]
    spans = sorted(pretrain["spans"].tolist(), key=lambda span: span[1] - span[0])[40:45]
    lengths = [end - start for start, end in spans]
    # A row that exactly holds the documents, so that none is cut at its end.
    pretrain["size"] = pretrain["size"]._replace(length=sum(lengths))
    (batch,) = pretrain["batches"](grain.MapDataset.source(spans), 1)
    assert batch[0]["segments"].max() == len(spans)
    with jax.enable_x64(True):
        model = ft.from_nnx(pretrain["GPT"])
        key = jax.random.key(0)
        params, _ = model.init(key, batch[0])
        leaves, structure = jax.tree.flatten(params)
        keys = jax.random.split(key, len(leaves))
        # The layers that begin with zeros would not show what tokens attend to.
        params = structure.unflatten(
            x + 0.3 * jax.random.normal(k, x.shape, np.float64)
            for k, x in zip(keys, leaves, strict=True)
        )
        loss = optax.softmax_cross_entropy_with_integer_labels
        loss_fn = ft.supervised(model, loss, reduction="weighted_mean")
        packed, aux = loss_fn(params, {}, batch, rng=None, training=False)
        alone = 0.0
        for start, end in spans:
            tokens = pretrain["tokens"][start : end + 1].astype(np.int32)[None]
            positions = np.arange(end - start)[None]
            inputs = {"tokens": tokens[:, :-1], "segments": 0 * positions, "positions": positions}
            logits = model.apply(params, {}, inputs).outputs
            assert logits.dtype == np.float64
            alone += float(loss(logits, tokens[:, 1:]).sum())
    assert int(aux.weight) == sum(lengths)
    # jax.nn.dot_product_attention computes its softmax in float32, whatever the dtype.
    np.testing.assert_allclose(packed, alone / sum(lengths), rtol=1e-8)


@pytest.mark.parametrize(("name", "millions"), [("gpt2", 124), ("gpt2-xl", 1_555)])
def test_the_sizes_of_gpt2_have_its_number_of_params(name, millions, pretrain) -> None:
    batch = next(iter(pretrain["train"]))
    pretrain["size"] = pretrain["SIZES"][name]
    params, _ = jax.eval_shape(pretrain["model"].init, jax.random.key(0), batch[0])
    assert round(sum(x.size for x in jax.tree.leaves(params)) / 1e6) == millions


@pytest.mark.long
def test_a_model_of_keras_is_pretrained_as_well(tmp_path) -> None:
    options = ("--quick", "--model", "keras", "--output", tmp_path)
    output = run(EXAMPLES / "pretrain.py", *options).splitlines()
    assert (
        number(output, "epoch 10/10", "val_loss") < number(output, "epoch 1/10", "val_loss") - 0.3
    )
