"""Saved by two processes with two devices each, gone on with by two that have one each."""

import re
from typing import Any

import pytest

from tests.distributed.reports import reports

REFUSED = {
    "the axes of before": "ValueError: axes: expected sizes whose product is 2, the number of",
    "the rule of before": r"ValueError: w: expected a spec that divides .* Resource axis: model",
    "no mesh": "CheckpointMismatchError: .*/run: expected a state on a mesh of all processes",
}


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What each of the processes reports, by name: a result or an error, and warnings."""
    folder = str(tmp_path_factory.mktemp("lost") / "run")
    before, after = reports("lost.py", folder, "2"), reports("lost.py", folder, "1")
    return [{**own, **then} for own, then in zip(before, after, strict=True)]


@pytest.mark.parametrize("what", REFUSED)
def test_a_mesh_that_is_gone_is_refused_in_every_process(what: str, found) -> None:
    for own in found:
        assert re.match(REFUSED[what], own[what][0])


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
