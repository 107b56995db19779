"""Jobs of a real Slurm, with the batch script of docs/devices.md: see `.ci/slurm`."""

import contextlib
import os
import pathlib
import random
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Generator
from typing import TypeAlias

import pytest

import functrain as ft
from tests.several_processes import lines_starting, train

ROOT = pathlib.Path(__file__).parents[2]
PROGRAM = ROOT / "tests" / "distributed" / "slurm_run.py"
EPOCHS = 60  # of eight steps
LIVES = 4  # as often does the script of the page start the tasks


def is_running() -> bool:
    """Returns True if the cluster of `.ci/slurm start` answers; nobody wants tests in another."""
    if shutil.which("scontrol") is None:
        return False
    config = subprocess.run(["scontrol", "show", "config"], capture_output=True, check=False)
    return re.search(rb"ClusterName += functrain\n.*is UP", config.stdout, re.S) is not None


pytestmark = [
    pytest.mark.slurm,
    pytest.mark.slow,
    pytest.mark.skipif(not is_running(), reason="needs the cluster of `.ci/slurm start`"),
]


def script_of_the_page() -> str:
    """Returns the batch script of docs/devices.md."""
    page = (ROOT / "docs" / "devices.md").read_text()
    (block,) = re.findall(r"\n((?: {4}#!/bin/bash\n)(?:(?: {4}.*)?\n)+)", page)
    return "".join(line.removeprefix("    ") for line in block.splitlines(keepends=True))


class Job:
    """The script of the page as a job of two tasks on this machine."""

    def __init__(self, folder: pathlib.Path, *options: str, slurm: str = "") -> None:
        folder.mkdir(exist_ok=True)
        self.directory, self._out = folder / "run", folder / "out"
        program = [sys.executable, str(PROGRAM), str(self.directory), str(EPOCHS), *options]
        script = folder / "train.sh"
        script.write_text(script_of_the_page().replace("python train.py", shlex.join(program)))
        resources = f"--nodes=1 --ntasks-per-node=2 --gpus-per-node=0 --time=30 {slurm}".split()
        self.number = subprocess.check_output(
            ["sbatch", "--parsable", *resources, f"--output={self._out}", str(script)],
            # Each line begins with the number of its task.
            env={**os.environ, "PYTHONPATH": str(ROOT), "SLURM_LABELIO": "1"},
            text=True,
        ).strip()

    def slurm_field(self, name: str) -> str:
        """Returns a field of the job in Slurm: JobState, Restarts, ExitCode, ..."""
        text = subprocess.check_output(["scontrol", "show", "job", self.number], text=True)
        (value,) = re.findall(rf"\b{name}=(\S+)", text)
        return value

    def printed(self) -> str:
        return self._out.read_text() if self._out.exists() else ""

    def lives(self) -> int:
        return self.printed().count("0: life\n")

    def steps(self) -> list[int]:
        """Returns the steps of the first task in all its lives."""
        return [int(step) for step in re.findall(r"^0: step (\d+)$", self.printed(), re.M)]

    def begins(self) -> list[int]:
        """Returns the steps of the checkpoints that the first task has resumed from."""
        return [int(step) for step in re.findall(r"^0: begins (\d+) ", self.printed(), re.M)]

    def latest(self) -> int:
        return ft.Checkpointer(self.directory).latest() or 0

    def processes(self) -> list[pathlib.Path]:
        """Returns the folders in /proc of all processes of the job: srun's, and the tasks."""
        folders = []
        for path in pathlib.Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):
                if os.fsencode(self.directory) in (path / "cmdline").read_bytes():
                    folders.append(path)
        return folders

    def tasks(self) -> dict[int, int]:
        """Returns the process of each task that has begun."""
        processes = {}
        for path in self.processes():
            with contextlib.suppress(OSError):
                if (path / "cmdline").read_bytes().startswith(os.fsencode(sys.executable)):
                    rank = re.search(rb"\0SLURM_PROCID=(\d+)", (path / "environ").read_bytes())
                    processes[int(rank[1])] = int(path.name)
        return processes

    def wait_until(self, condition: Callable[[], object], seconds: float = 300) -> None:
        deadline = time.monotonic() + seconds
        while not condition():
            assert time.monotonic() < deadline, self.printed()[-5000:]
            time.sleep(0.1)

    def wait_for_steps(self, life: int = 1) -> None:
        """Waits until a life has taken steps, and there is a checkpoint; or the job is over."""
        self.wait_until(lambda: self.is_over() or (self.lives() >= life and self.latest()))
        before = len(self.steps())
        self.wait_until(lambda: self.is_over() or len(self.steps()) > before + 4)

    def is_over(self) -> bool:
        return self.slurm_field("JobState") not in ("PENDING", "RUNNING", "COMPLETING")

    def wait(self) -> str:
        """Waits until the job is over and none of its processes is left; returns its state."""
        self.wait_until(self.is_over)
        self.wait_until(lambda: not self.processes(), seconds=30)
        return self.slurm_field("JobState")

    def ends(self) -> list[str]:
        """Waits until the job is over; returns the results that its tasks have printed."""
        assert self.wait() == "COMPLETED", self.printed()[-5000:]
        return re.findall(r"^\d: (ends \w{64})$", self.printed(), re.M)


Submit: TypeAlias = Callable[..., Job]


@pytest.fixture
def submit(tmp_path: pathlib.Path) -> Generator[Submit]:
    """Submits jobs, in a folder of the test, that end with it."""
    jobs: list[Job] = []

    def start(*options: str, folder: str = "job", slurm: str = "") -> Job:
        jobs.append(Job(tmp_path / folder, *options, slurm=slurm))
        return jobs[-1]

    yield start
    for job in jobs:
        subprocess.check_call(["scancel", "--quiet", job.number])


@pytest.fixture(scope="module")
def straight(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The result of the training in two processes, without Slurm."""
    printed = train(2, tmp_path_factory.mktemp("straight") / "run", EPOCHS)
    (ends,) = set(lines_starting(printed, "ends"))
    return ends


def test_two_tasks_find_each_other_and_have_the_bits_of_a_run_without_slurm(
    submit, straight
) -> None:
    job = submit()
    assert job.ends() == [straight, straight]
    assert job.lives() == 1


def test_before_its_time_limit_a_job_is_saved_and_queued_again(submit, straight) -> None:
    job = submit("--pause=1", slurm="--time=1 --signal=B:USR1@10")
    assert set(job.ends()) == {straight}  # printed again, if a signal comes after the last step
    assert int(job.slurm_field("Restarts")) >= 1
    assert len(set(job.steps())) == len(job.steps())  # no step was taken twice
    assert "exit code 143" in job.printed()


@pytest.mark.parametrize("kills", [2, pytest.param(20, marks=pytest.mark.long)])
def test_a_task_killed_at_random_moments_costs_no_bit(kills, submit, straight) -> None:
    chance, done, went_on = random.Random(kills), 0, 0
    while done < kills:
        job = submit(folder=str(done))
        for life in range(1, min(kills - done, LIVES - 1) + 1):
            done += kill_one(job, life, chance)
        assert set(job.ends()) == {straight}
        assert job.begins() == sorted(job.begins())
        went_on += len(job.begins())
    print(f"{done} kills, {went_on} times a job went on from a checkpoint")
    assert went_on


def kill_one(job: Job, life: int, chance: random.Random) -> bool:
    """Kills a task at some moment of a life; returns False if the job was over."""
    job.wait_until(lambda: job.is_over() or len(job.tasks()) == 2)
    if chance.random() < 0.7:  # else it is killed while it begins
        job.wait_for_steps(life)
    time.sleep(chance.uniform(0, 2))
    tasks, went_on, saved = list(job.tasks().values()), len(job.begins()), job.latest()
    if not tasks:
        return False
    os.kill(chance.choice(tasks), signal.SIGKILL)
    # Slurm ends the other one. The next life begins at what was saved, or later.
    job.wait_until(lambda: not set(tasks) & set(job.tasks().values()), seconds=60)
    job.wait_until(lambda: job.is_over() or job.lives() > life)
    assert all(step >= saved for step in job.begins()[went_on:])
    return True


TASKS = [pytest.param(0, marks=pytest.mark.long), 1]


@pytest.mark.parametrize("task", TASKS)
def test_where_a_task_loops_the_watchdog_ends_the_tasks_with_124(task, submit, straight) -> None:
    job = submit("--watchdog=5", f"--loop-in={task}")
    assert job.ends() == [straight, straight]
    assert job.lives() == 2
    assert job.begins()
    assert f"{task}: functrain.hooks.Watchdog: no step has ended for 5 seconds" in job.printed()
    assert "Exited with exit code 124" in job.printed()


@pytest.mark.parametrize("task", TASKS)
def test_where_a_task_is_stopped_the_watchdog_ends_the_other_and_slurm_all(
    task, submit, straight
) -> None:
    job = submit("--watchdog=5")
    job.wait_for_steps()
    os.kill(job.tasks()[task], signal.SIGSTOP)
    assert job.ends() == [straight, straight]
    assert job.lives() == 2
    assert job.begins()
    assert f"{1 - task}: functrain.hooks.Watchdog: the process ends" in job.printed()
    assert re.search(f"task {1 - task}: Exited with exit code 124", job.printed())


def test_sigusr1_saves_a_step_that_was_not_due_and_the_job_goes_on(submit, straight) -> None:
    job = submit("--pause=1")
    # Programs end after the steps 2, 4, 5, 7, 9, 10, ..., and each fifth step is saved.
    job.wait_until(lambda: job.steps() and job.steps()[-1] % 5 == 2)
    subprocess.check_call(["scancel", "--signal=USR1", job.number])
    job.wait_until(lambda: job.latest() % 5)
    saved = job.latest()
    os.kill(job.tasks()[1], signal.SIGKILL)
    assert job.ends() == [straight, straight]
    assert job.begins()[0] >= saved


def test_a_cancelled_job_is_saved_and_not_queued_again(submit, straight) -> None:
    job = submit()
    job.wait_for_steps()
    subprocess.check_call(["scancel", job.number])
    assert job.wait() == "CANCELLED"
    assert job.latest() == job.steps()[-1]
    assert job.slurm_field("Restarts") == "0"
    assert submit().ends() == [straight, straight]  # in the same folder


def test_a_job_that_is_requeued_from_outside_is_saved_and_goes_on(submit, straight) -> None:
    job = submit()
    job.wait_for_steps()
    subprocess.check_call(["scontrol", "requeue", job.number])
    assert job.ends() == [straight, straight]
    assert job.slurm_field("Restarts") == "1"
    assert len(set(job.steps())) == len(job.steps())  # no step was taken twice


@pytest.mark.parametrize("option", ["--fail-in=1", "--no-such-option"])
def test_a_job_that_always_fails_is_started_a_few_times_and_not_queued_again(
    option, submit
) -> None:
    job = submit(option)
    assert job.wait() == "FAILED"
    assert len(re.findall(r"srun: .*Terminating StepId", job.printed())) == LIVES
    assert job.slurm_field("Restarts") == "0"
