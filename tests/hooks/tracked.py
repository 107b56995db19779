"""A run with a tracker, which `test_trackers.py` starts in a process of its own, and kills."""

import os
import pathlib
import sys
import time
from typing import Any

import jax.numpy as jnp

import functrain as ft
from tests.hooks.fits import EVAL, LOADER, fit


def tracker(name: str, folder: pathlib.Path, **how: Any) -> Any:
    """Returns the hook, which logs every step below a folder and needs no network."""
    make = getattr(ft.hooks, name)
    if name == "TensorBoard":
        return make(folder / "events", every=1)
    if name == "WandB":
        import wandb

        settings = wandb.Settings(silent=True, console="off")
        return make(every=1, project="p", mode="offline", dir=str(folder), settings=settings, **how)
    if name == "MLflow":
        os.environ["MLFLOW_TRACKING_URI"] = f"sqlite:///{folder}/mlflow.db"
        os.environ["MLFLOW_ARTIFACT_ROOT"] = str(folder / "artifacts")
        return make(every=1, **how)
    if name == "Trackio":
        os.environ["TRACKIO_DIR"] = str(folder / "trackio")
        return make(every=1, project="p", embed=False, auto_log_cpu=False, **how)
    import comet_ml

    settings = comet_ml.ExperimentConfig(
        offline_directory=str(folder / "comet"),
        auto_output_logging=False,
        log_code=False,
        log_env_details=False,
        log_git_metadata=False,
    )
    return make(every=1, online=False, project_name="p", experiment_config=settings, **how)


def sources() -> list[Any]:
    """Returns hooks that add values and samples."""
    evaluation = ft.hooks.Evaluate(EVAL, LOADER, every=ft.every(steps=7))
    sample = ft.hooks.Sample(
        lambda state: {"words": "a < b", "weights": jnp.abs(state.params["w"])[None]},
        every=ft.every(steps=9),
    )
    return [evaluation, sample]


def run(*hooks: Any, **how: Any) -> Any:
    """Trains with values and samples of all kinds; returns the history."""
    return fit(*sources(), *hooks, fuse=2, **how)[1]


if __name__ == "__main__":
    name, folder = sys.argv[1], pathlib.Path(sys.argv[2])
    os.chdir(folder)
    slow = ft.every(steps=1)(lambda event: time.sleep(0.02))
    hooks = [tracker(name, folder), slow]
    if len(sys.argv) > 3:
        # The run waits for its kill there, before the step is saved: it must not end first.
        hooks.append(ft.at(int(sys.argv[3]))(lambda event: time.sleep(600)))
    checkpointer = ft.Checkpointer(folder / "checkpoints", every=ft.every(steps=5))
    run(*hooks, checkpointer=checkpointer)
