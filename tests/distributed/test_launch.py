"""Processes on one machine: started, started again when one dies, ended together."""

import json
import os
import pathlib
import re
import signal
import subprocess
import sys
from typing import Any

import pytest

from functrain.distributed import _launch

ROOT = pathlib.Path(__file__).parent.parent.parent
TRAINING = ROOT / "tests" / "checkpoint" / "processes.py"


READY = "sys.stdout.write('ready\\n'); sys.stdout.flush()"  # at once: the others write, too


def launched(*arguments: object) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "functrain.launch", "-n", "2", *map(str, arguments)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )


def script(folder: pathlib.Path, text: str) -> pathlib.Path:
    path = folder / "script.py"
    path.write_text(f"import os, sys, time\nown = os.environ['JAX_PROCESS_ID']\n{text}\n")
    return path


@pytest.mark.long
def test_when_one_dies_all_are_started_again_and_go_on(tmp_path) -> None:
    process = launched(TRAINING, tmp_path / "run", 3, 16)  # the save at 15 waits for that at 10
    out, err = process.communicate(timeout=240)
    assert process.returncode == 0, err[-3000:]
    lines = out.splitlines()
    ends = [line.removeprefix("[1] ") for line in lines if "ends" in line]
    assert len(ends) == 2
    assert ends[0] == ends[1]
    assert "process 1 ended with 137" in err
    assert "restarting all processes (1 of 3)" in err
    assert any("begins " in line for line in lines)  # C++ libraries print into lines


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux binds processes to cores")
def test_each_gets_cores_of_its_own_where_that_is_asked_for(tmp_path) -> None:
    mine = os.sched_getaffinity(0)
    if len(mine) < 2:
        pytest.skip("there is one core")
    path = script(tmp_path, "print('cores', sorted(os.sched_getaffinity(0)))")
    out, err = launched("--bind", path).communicate(timeout=100)
    found = [set(json.loads(line.partition("cores ")[2])) for line in out.splitlines()]
    assert not set.intersection(*found), err
    assert set.union(*found) == mine
    too_many = launched("--bind", "-n", 10_000, path)
    assert "a core for each process" in too_many.communicate(timeout=100)[1]
    assert too_many.returncode == 2


def test_it_gives_up_after_so_many_restarts_with_the_status_of_who_failed(tmp_path) -> None:
    path = script(tmp_path, "print('life', flush=True)\nif own == '1': sys.exit(3)\ntime.sleep(60)")
    process = launched("--restarts", 1, path)
    out, err = process.communicate(timeout=60)
    assert process.returncode == 3
    assert out.count("[1] life") == 2
    assert "gave up after 1 restarts" in err


def test_a_script_that_does_not_exist_is_refused(tmp_path, capsys) -> None:
    with pytest.raises(SystemExit):
        _launch.main(["-n", "2", str(tmp_path / "nowhere.py")])
    assert "argument script: expected a Python file, got" in capsys.readouterr().err


def test_a_script_that_refuses_its_arguments_is_not_started_again(tmp_path, capfd) -> None:
    path = script(tmp_path, "import argparse\nargparse.ArgumentParser().parse_args()")
    assert _launch.main(["-n", "2", str(path), "--no-such-option"]) == 2
    out, err = capfd.readouterr()
    assert "unrecognized arguments: --no-such-option" in out + err
    assert "restarting all processes" not in err


def test_the_others_get_sigterm_when_one_dies(tmp_path, capfd) -> None:
    path = script(
        tmp_path,
        "import signal\n"
        "signal.signal(signal.SIGTERM, lambda *_: (print('cleared up', flush=True), sys.exit(1)))\n"
        f"there = {str(tmp_path / 'there')!r}\n"
        "if own == '0':\n    open(there, 'w').close()\n    time.sleep(60)\n"
        "while not os.path.exists(there):\n    time.sleep(0.01)\n"
        "sys.exit(3)",
    )
    assert _launch.main(["-n", "2", "--restarts", "0", str(path)]) == 3
    assert "cleared up" in capfd.readouterr().out


def end_by_sigterm(process: Any) -> str:
    """Sends SIGTERM once both processes are ready; returns what the launcher says."""
    for _ in range(2):
        process.stdout.readline()
    process.send_signal(signal.SIGTERM)
    _, err = process.communicate(timeout=30)
    return err


def test_sigterm_is_passed_on_and_waited_for(tmp_path) -> None:
    wait = "signal.signal(signal.SIGTERM, lambda *_: (sys.stdout.write('saved\\n'), sys.exit(143)))"
    path = script(
        tmp_path,
        f"import signal\n{wait}\nsys.stdout.write('ready\\n'); sys.stdout.flush()\ntime.sleep(60)",
    )
    process = launched(path)
    assert process.stdout is not None
    ready = [process.stdout.readline().strip(), process.stdout.readline().strip()]
    assert sorted(ready) == ["[1] ready", "ready"]
    process.send_signal(signal.SIGTERM)
    out, err = process.communicate(timeout=60)
    assert process.returncode == 143
    assert sorted(out.split("\n")) == ["", "[1] saved", "saved"]
    assert err == ""


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux kills with the parent")
def test_what_it_started_ends_with_the_launcher_however_that_ends(tmp_path) -> None:
    ignore = "import signal\nsignal.signal(signal.SIGTERM, signal.SIG_IGN)"
    say = "sys.stdout.write(f'{os.getpid()}\\n'); sys.stdout.flush()"
    process = launched(script(tmp_path, f"{ignore}\n{say}\ntime.sleep(60)"))
    assert process.stdout is not None
    pids = [int(process.stdout.readline().removeprefix("[1] ")) for _ in range(2)]
    process.kill()
    process.communicate(timeout=30)  # until nobody has its streams open any more
    for pid in pids:
        status = pathlib.Path(f"/proc/{pid}/stat")
        assert not status.exists() or status.read_text().rpartition(")")[2].split()[0] == "Z"


def test_who_does_not_end_after_sigterm_is_killed(tmp_path) -> None:
    path = script(
        tmp_path,
        f"import signal\nsignal.signal(signal.SIGTERM, signal.SIG_IGN)\n{READY}\ntime.sleep(60)",
    )
    process = launched("--grace", 0.2, path)
    assert "not ended within 0.2 s of SIGTERM" in end_by_sigterm(process)
    assert process.returncode == 143


def test_one_that_fails_after_sigterm_gives_its_status(tmp_path) -> None:
    path = script(
        tmp_path,
        f"import signal\nsignal.signal(signal.SIGTERM, lambda *_: sys.exit(143 - 142 * int(own)))\n"
        f"{READY}\ntime.sleep(60)",
    )
    process = launched(path)
    assert end_by_sigterm(process) == "functrain.launch: process 1 ended with 1\n"
    assert process.returncode == 1


def test_lines_are_passed_on_byte_by_byte(tmp_path) -> None:
    write = "sys.stdout.buffer.write(b'\\xff \\xc3\\xa9\\n')"
    script_path = script(tmp_path, f"if own == '1': {write}")
    program = [sys.executable, "-m", "functrain.launch", "-n", "2", str(script_path)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    assert subprocess.check_output(program, cwd=ROOT, env=environment) == b"[1] \xff \xc3\xa9\n"


@pytest.mark.parametrize(
    ("option", "value", "words"),
    [
        ("--processes", 0, "expected at least 1, got 0"),
        ("--restarts", -1, "expected at least 0, got -1"),
        ("--grace", "nan", "expected at least 0, got nan"),
        ("--cpu-devices", "two", "invalid int value"),
    ],
)
def test_a_number_that_makes_no_sense_is_refused_with_the_option(
    capsys, option, value, words
) -> None:
    with pytest.raises(SystemExit):
        _launch.main(["-n", "2", f"{option}={value}", __file__])
    assert re.search(f"argument {option}: {words}", capsys.readouterr().err)


def test_if_one_cannot_be_started_the_others_are_ended(tmp_path, monkeypatch) -> None:
    started, start = [], _launch._start

    def start_one(*arguments: Any) -> subprocess.Popen[str]:
        if started:
            raise OSError("no more processes")
        started.append(start(*arguments))
        return started[0]

    monkeypatch.setattr(_launch, "_start", start_one)
    with pytest.raises(OSError, match="no more processes"):
        _launch.main(["-n", "2", str(script(tmp_path, "time.sleep(60)"))])
    assert started[0].returncode is not None
