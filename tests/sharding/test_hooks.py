"""Hooks where a state is divided over eight devices."""

import pathlib
from typing import Any

import numpy as np
import pytest

from tests.sharding.test_eight_devices import run

FORMS = ["fsdp x tensor", "explicit"]


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder: pathlib.Path = tmp_path_factory.mktemp("hooks")
    return {name: said for line in run("hooks.py", str(folder)) for name, said in line.items()}


@pytest.mark.parametrize("form", FORMS)
def test_hooks_see_what_they_see_on_one_device(form: str, found) -> None:
    one, divided = found["one device"], found[form]
    same = ("best_step", "step", "rates", "samples", "seen", "kept")
    assert {name: divided[name] for name in same} == {name: one[name] for name in same}
    for name in ("val_loss", "csv"):
        np.testing.assert_allclose(divided[name], one[name], rtol=2e-6)
    assert len(divided["csv"]) == 16
    assert divided["json"] == divided["csv"]


@pytest.mark.parametrize("form", FORMS)
def test_the_best_state_comes_back_to_where_it_was(form: str, found) -> None:
    one, divided = found["one device"], found[form]
    assert divided["stays"]
    assert (divided["best_step"], divided["step"]) == (8, 8)  # of sixteen
    np.testing.assert_allclose(divided["w"], one["w"], rtol=1e-5, atol=1e-6)
