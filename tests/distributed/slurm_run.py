"""The training of tests/checkpoint/processes.py, as a job of Slurm; see test_slurm.py.

python slurm_run.py DIRECTORY EPOCHS [--watchdog S] [--pause S] [--loop-in TASK] [--fail-in TASK]
"""

import argparse
import time

import jax

import functrain as ft
from tests.checkpoint import processes

LAST = 24  # the step at which a task loops or fails


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("directory")
    parser.add_argument("epochs", type=int)
    parser.add_argument("--watchdog", type=float, default=60.0, help="seconds")
    parser.add_argument(
        "--pause", type=float, default=0.0, help="seconds after each program, in the first life"
    )
    parser.add_argument("--loop-in", type=int, help="the task that loops, in the first life")
    parser.add_argument("--fail-in", type=int, help="the task that fails, in each life")
    return parser.parse_args()


def main() -> None:
    options = parse()
    print("life", flush=True)
    is_first = ft.Checkpointer(options.directory).latest() is None

    def act(event: ft.events.Event) -> None:
        if not isinstance(event, ft.events.ChunkEnd):
            return
        if is_first:
            time.sleep(options.pause)
        if event.step < LAST:
            return
        if options.fail_in == jax.process_index():
            raise ValueError("mine")
        while is_first and options.loop_in == jax.process_index():
            pass

    hooks = [ft.hooks.Watchdog(options.watchdog), act]
    processes.main(options.directory, options.epochs, hooks=hooks)


if __name__ == "__main__":
    main()
