"""Four devices in one process, in two processes, in four: the same training."""

import ast
import pathlib

import numpy as np
import pytest

from tests.several_processes import lines_starting, train


def losses(processes: int, folder: pathlib.Path) -> list[float]:
    printed = train(processes, folder / str(processes), 2)
    assert len(set(lines_starting(printed, "ends "))) == 1, "digests of the state"
    (line,) = set(lines_starting(printed, "losses "))
    return ast.literal_eval(line.removeprefix("losses "))  # type: ignore[no-any-return]


@pytest.mark.long
@pytest.mark.parametrize("processes", [2, 4])
def test_several_processes_have_the_losses_of_one_with_as_many_devices(
    processes: int, tmp_path: pathlib.Path
) -> None:
    one, several = losses(1, tmp_path), losses(processes, tmp_path)
    assert len(one) == 16
    np.testing.assert_allclose(several, one, rtol=1e-6)
