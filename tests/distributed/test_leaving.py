"""One of two processes leaves a run: the others end soon, with a status and a reason."""

import pathlib
import re
import time

import pytest

from tests.checkpoint.test_processes import start

PROGRAM = str(pathlib.Path(__file__).parent / "leaving.py")
REASONS = {
    "break": "process {} has (ended|left the run after 60 steps)",
    "continue": "process {} has left the run after 60 steps",
    "exit0": "process {} has ended",
    "exit3": "process {} has ended",
    "exception": "ValueError: mine",
    "before": "process {} has ended",
    "sleep": "Watchdog: no step has ended for 3 seconds",
}


CASES = [
    pytest.param(way, process, marks=[] if (way, process) == ("break", 1) else pytest.mark.long)
    for way in REASONS
    for process in (0, 1)
]


@pytest.mark.parametrize(("way", "process"), CASES)
def test_however_a_process_leaves_a_run_that_saves_all_end_in_ten_seconds(
    tmp_path: pathlib.Path, way: str, process: int
) -> None:
    started = start(2, [PROGRAM], way, str(process), str(tmp_path / "run"))
    try:
        done = [x.communicate(timeout=120) for x in started]
    finally:
        for x in started:
            x.kill()
    seconds = time.monotonic() - float(re.findall("leaves (.*)", done[process][0])[0])
    assert seconds < 10, done
    assert [x.returncode for x in started] == [1, 1], done
    assert re.search(REASONS[way].format(process), done[0][1] + done[1][1]), done
    assert "*** SIG" not in done[0][1] + done[1][1]  # no crash of C++ libraries
