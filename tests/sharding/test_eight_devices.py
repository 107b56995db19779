"""Every way to divide a training over eight devices gives the numbers of one, and stays divided."""

import json
import os
import pathlib
import sys
from typing import Any

import numpy as np
import pytest

from tests import fork_server

ROOT = pathlib.Path(__file__).parents[2]
FORMS = ["data", "fsdp", "tensor", "data x tensor", "fsdp x tensor", "fsdp over both"]
ALL = [f"{name}:{form}" for name in ("mlp", "transformer", "keras") for form in FORMS]
ALL.append("transformer:batch x sequence")


def run(program: str, *arguments: str) -> list[Any]:
    done = fork_server.run(
        [sys.executable, str(ROOT / "tests" / "sharding" / program), *arguments],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return [json.loads(line) for line in done.stdout.splitlines()]


@pytest.mark.long
def test_every_way_to_divide_a_training_gives_the_losses_of_one_device() -> None:
    for name, found in zip(ALL, run("eight.py", *ALL), strict=True):
        np.testing.assert_allclose(found["losses"], found["alone"], rtol=2e-6, err_msg=name)
        assert found["stays"], name
        assert found.get("same for each K", True), name
        if name.startswith("keras"):
            assert found["losses"] == found["keras"], name
        else:
            assert found["bytes"] == [found["rule"]] * 8, name


@pytest.fixture(scope="module")
def compiled() -> dict[str, Any]:
    (found,) = run("compiled.py")
    return found  # type: ignore[no-any-return]


@pytest.mark.parametrize("form", ["data", "fsdp", "tensor", "fsdp x tensor"])
def test_as_much_is_sent_as_by_a_program_written_by_hand(compiled, form: str) -> None:
    by_hand, step, fused = compiled[form]
    assert by_hand
    assert step == by_hand
    assert fused == by_hand


def test_under_fsdp_no_more_than_the_layer_in_use_is_gathered(compiled) -> None:
    found = compiled["layers"]
    layer, layers = 128 * 128 * 4, 24
    assert found["gathered at once"] == [layer]
    assert found["all-gather"] == [2 * layers, 2 * layers * layer]  # forward, and backward
    assert found["temporary"] < layers * layer / 2
