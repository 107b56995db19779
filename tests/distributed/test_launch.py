"""Processes on one machine: started, started again when one dies, ended together."""

import json
import os
import pathlib
import signal
import subprocess
import sys

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


def test_it_gives_up_after_so_many_restarts_with_the_status_of_who_failed(tmp_path) -> None:
    path = script(tmp_path, "print('life', flush=True)\nif own == '1': sys.exit(3)\ntime.sleep(60)")
    process = launched("--restarts", 1, path)
    out, err = process.communicate(timeout=60)
    assert process.returncode == 3
    assert out.count("[1] life") == 2
    assert "restarting all processes (1 of 1)" in err


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


# What each process does at SIGTERM, and the status and the words of the launcher then.
AT_SIGTERM = {
    "saves": ("lambda *_: (sys.stdout.write('saved\\n'), sys.exit(143))", 60, 143, ""),
    "fails in one": ("lambda *_: sys.exit(143 - 142 * int(own))", 60, 1, "process 1 ended with 1"),
    "ignores it": ("signal.SIG_IGN", 0.2, 143, "not ended within 0.2 s of the signal"),
}


@pytest.mark.parametrize("name", AT_SIGTERM)
def test_sigterm_is_passed_on_and_waited_for(name, tmp_path) -> None:
    handler, grace, status, words = AT_SIGTERM[name]
    text = f"import signal\nsignal.signal(signal.SIGTERM, {handler})\n{READY}\ntime.sleep(60)"
    process = launched("--grace", grace, script(tmp_path, text))
    ready = [process.stdout.readline().strip() for _ in range(2)]
    assert sorted(ready) == ["[1] ready", "ready"]
    process.send_signal(signal.SIGTERM)
    out, err = process.communicate(timeout=60)
    assert process.returncode == status
    assert words in err
    assert out.count("saved") == (2 if name == "saves" else 0)


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


def test_lines_are_passed_on_byte_by_byte(tmp_path) -> None:
    write = "sys.stdout.buffer.write(b'\\xff \\xc3\\xa9\\n')"
    script_path = script(tmp_path, f"if own == '1': {write}")
    program = [sys.executable, "-m", "functrain.launch", "-n", "2", str(script_path)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    assert subprocess.check_output(program, cwd=ROOT, env=environment) == b"[1] \xff \xc3\xa9\n"


def test_what_is_missing_is_named_without_what_may_be_missing(capsys) -> None:
    with pytest.raises(SystemExit):
        _launch.main([])
    required = capsys.readouterr().err.rpartition("required: ")[2]
    assert required == "-n/--processes, script\n"


@pytest.mark.parametrize("option", ["--processes=0", "--restarts=-1", "--cpu-devices=two"])
def test_a_number_that_makes_no_sense_is_refused_with_the_option(capsys, option) -> None:
    with pytest.raises(SystemExit):
        _launch.main(["-n", "2", option, __file__])
    assert option.partition("=")[0] in capsys.readouterr().err.splitlines()[-1]
