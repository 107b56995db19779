"""Saved by two processes with two devices each, gone on with by two that have one each."""

import json
import pathlib
from typing import Any

import numpy as np
import pytest

from tests.checkpoint.test_processes import ended, start

REFUSED = {
    "the axes of before": "ValueError: axes: expected sizes whose product is 2, the number of",
    "the rule of before": "ValueError: w: P('data', 'model'): expected axes of the mesh, ('data',)",
    "no mesh": "CheckpointMismatchError: ./run: expected a state on a mesh of all processes",
}


def tried(folder: pathlib.Path, devices: int) -> list[dict[str, Any]]:
    program = [str(pathlib.Path(__file__).parent / "lost.py")]
    printed = ended(start(2, program, str(folder / "run"), str(devices)))
    lines = ([line for line in lines if line.startswith("{")] for lines in printed)
    text = ("".join(own).replace(str(folder), ".").replace("}{", ",") for own in lines)
    return [json.loads(own) for own in text]


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What each of the processes says, by name: a result or an error, and warnings."""
    folder = tmp_path_factory.mktemp("lost")
    before, after = tried(folder, 2), tried(folder, 1)
    return [{**own, **then} for own, then in zip(before, after, strict=True)]


@pytest.mark.parametrize("what", REFUSED)
def test_a_mesh_that_is_gone_is_refused_in_every_process(what: str, found) -> None:
    for own in found:
        assert own[what][0].startswith(REFUSED[what])


def test_on_another_mesh_the_run_goes_on_and_says_so(found) -> None:
    for own in found:
        (losses, nothing), (more, warnings) = own["four"], own["another mesh"]
        assert nothing == []
        assert more[:8] == losses
        assert len(more) == 12
        assert max(more[8:]) < min(losses)
        (warning,) = warnings
        assert "devices: saved with 4, now 2" in warning
        assert "mesh: saved with [\"{'data': 2, 'model': 2}\"], now [\"{'data': 2}\"]" in warning


def test_it_goes_on_with_the_numbers_of_one_device(found) -> None:
    """By hand, in float64: Adam as Kingma and Ba have it."""
    rows = np.random.default_rng(0).normal(size=(32, 8)).astype(np.float32).astype(np.float64)
    params = {"w": np.ones((8, 16)), "v": np.ones((16, 1))}
    first, second = ({n: np.zeros_like(p) for n, p in params.items()} for _ in range(2))
    losses = []
    for step in range(12):
        x = rows[8 * (step % 4) : 8 * (step % 4) + 8]
        error = x @ params["w"] @ params["v"] - 1
        losses.append(np.mean(error**2))
        to_outputs = 2 / len(x) * error
        gradients = {"w": x.T @ to_outputs @ params["v"].T, "v": (x @ params["w"]).T @ to_outputs}
        for n, g in gradients.items():
            first[n] = 0.9 * first[n] + 0.1 * g
            second[n] = 0.999 * second[n] + 0.001 * g**2
            rate = 0.1 * np.sqrt(1 - 0.999 ** (step + 1)) / (1 - 0.9 ** (step + 1))
            params[n] = params[n] - rate * first[n] / (np.sqrt(second[n]) + 1e-8)
    np.testing.assert_allclose(found[0]["another mesh"][0], losses, rtol=1e-4)
