"""Two processes with two devices each, of which each has a part of the data."""

import re
from typing import Any

import numpy as np
import pytest

from tests.distributed.reports import reports

X = np.random.default_rng(0).normal(size=(48, 3)).astype(np.float32)
PARTS = [X[0::2], X[1::2]]
REFUSED = {
    "fewer batches, of unknown length": "data: .*got next 6 in process 0, 4 in process 1",
    "the same part in both": "sharding: .* It gives this process 1 of 1 shards",
    "fewer batches to evaluate on": "eval_data: .*batches: 6 in process 0, 4 in process 1",
    "a clock": "every: expected .* whose clocks differ, got every\\(seconds=1\\)",
    "other lengths": "data: .*examples: 48 in process 0, 40 in process 1",
    "other epochs": "data: .*epochs: 2 in process 0, 3 in process 1",
}


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What each of the processes says, by name."""
    found = reports("parts.py", str(tmp_path_factory.mktemp("parts")))
    return [{name: result for name, (result, _) in own.items()} for own in found]


def whole(batch: int) -> np.ndarray:
    """The batch that the two processes give together."""
    rows = slice(4 * batch, 4 * batch + 4)
    return np.concatenate([part[rows] for part in PARTS]).astype(np.float64)


def by_hand(epochs: int) -> tuple[np.ndarray, list[float]]:
    w, losses = np.zeros(3), []
    for step in range(6 * epochs):
        x = whole(step % 6)
        losses.append(float(np.mean((x @ w - 1) ** 2)))
        w = w - 0.1 * 2 / len(x) * x.T @ (x @ w - 1)
    return w, losses


@pytest.mark.long
def test_a_batch_is_what_all_processes_give_together(found) -> None:
    np.testing.assert_allclose(found[0]["MapDataset"][0], by_hand(2)[1], rtol=1e-5)


@pytest.mark.parametrize("kind", ["MapDataset", "DataLoader", "ArrayLoader"])
def test_losses_are_the_same_in_all_processes_and_for_each_number_of_steps_fused(
    kind: str, found
) -> None:
    assert found[0][kind] == found[1][kind]
    one, three = found[0][kind]
    assert len(one) == 12
    assert one == three


def test_a_part_each_is_evaluated_and_predicted_as_a_whole(found) -> None:
    w, _ = by_hand(1)
    trained, loss = found[0]["evaluated"]
    np.testing.assert_allclose(trained, w, rtol=1e-5)
    np.testing.assert_allclose(loss, np.mean((X.astype(np.float64) @ w - 1) ** 2), rtol=1e-5)
    expected = np.concatenate([2 * whole(i) for i in range(6)])
    np.testing.assert_array_equal(found[0]["predicted"], expected)
    assert found[0]["predicted"] == found[1]["predicted"]


def test_members_that_are_divided_over_processes_stop_with_their_best_states(found) -> None:
    assert found[0]["stopped"] == found[1]["stopped"] == [[2, 2, 3, 4], [2, 1, 1, 1], 3]


@pytest.mark.parametrize("name", ["of each", "of all"])
def test_examples_that_the_devices_do_not_divide_are_evaluated_and_predicted(name, found) -> None:
    parts = [part[:21] for part in PARTS]
    batches = [np.concatenate([part[i : i + 4] for part in parts]) for i in range(0, 21, 4)]
    expected = np.concatenate(batches) if name == "of each" else X[:42]
    loss, outputs = found[0][f"undivided {name}"]
    errors = expected.astype(np.float64) @ np.arange(3.0) - 1
    np.testing.assert_allclose(loss, np.mean(errors**2), rtol=1e-5)
    np.testing.assert_array_equal(np.array(outputs, np.float32), expected)
    assert found[1][f"undivided {name}"] == found[0][f"undivided {name}"]


@pytest.mark.parametrize("kind", ["shuffled", "ArrayLoader resumed"])
def test_a_run_goes_on_in_mid_epoch_in_each_part(kind: str, found) -> None:
    for own in found:
        step, straight, resumed = own[kind]
        assert step == 8
        assert straight == resumed


def test_another_part_than_the_one_that_was_saved_is_refused(found) -> None:
    assert "process 1 failed" in found[0]["another part in the second"]
    assert "expected the data of the run that was saved" in found[1]["another part in the second"]


@pytest.mark.parametrize("what", REFUSED)
def test_what_differs_is_refused_in_every_process(what: str, found) -> None:
    for own in found:
        assert re.match(f"ValueError: {REFUSED[what]}", own[what], re.DOTALL), own[what]
