"""Runs within ray.train's JaxTrainer, on workers that have only CPUs: `make test-ray`."""

import importlib.util
import json
import os
import pathlib
import random
import signal
import time
from collections.abc import Iterator
from concurrent import futures
from typing import Any

import numpy as np
import pytest

pytestmark = [
    pytest.mark.ray,
    pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="needs ray"),
    pytest.mark.filterwarnings("ignore"),  # Ray's own
]

EPOCHS, STEPS = 8, 4
ALL_STEPS = [STEPS * (epoch + 1) for epoch in range(EPOCHS)]


def adam() -> Any:
    import optax

    return optax.adam(0.1)


def trouble(config: dict[str, Any]) -> Any:
    """Returns a hook that gets one worker into trouble at a step, in its first life."""
    import jax

    import functrain as ft

    mark = pathlib.Path(config["folder"], "trouble")

    @ft.every(steps=14)
    def hook(event: Any) -> None:
        if jax.process_index() != config["rank"] or mark.exists():
            return
        mark.write_text(f"{os.getpid()} {time.time()}")
        if isinstance(config["trouble"], int):
            os.kill(os.getpid(), config["trouble"])
        while config["trouble"] == "loop":
            pass
        if config["trouble"] == "stop":
            event.stop()

    return hook


def train(config: dict[str, Any]) -> None:
    """What each worker does."""
    import jax
    import optax
    from jax.experimental import multihost_utils

    import functrain as ft

    ft.distributed.initialize()  # Ray has done it: this does nothing
    folder = pathlib.Path(config["folder"])
    with open(folder / f"pids-{jax.process_index()}", "a") as file:
        print(os.getpid(), file=file)
    mesh = ft.sharding.mesh({"data": -1})
    tx = adam()
    x = np.random.default_rng(0).normal(size=(64, 8)).astype(np.float32)

    def apply(params: Any, model_state: Any, x: Any, **how: Any) -> Any:
        return ft.ModelOutput(x @ params["w"], model_state)

    def make() -> ft.TrainState:
        return ft.TrainState.create(params={"w": np.zeros((8, 1), np.float32)}, tx=tx)

    checkpointer = ft.Checkpointer(folder / "run", keep=None)
    hooks = [ft.hooks.RayReport(checkpointer), lambda _: time.sleep(config.get("pause", 0))]
    if "trouble" in config:
        hooks.append(trouble(config))
    if "watchdog" in config:
        hooks.append(ft.hooks.Watchdog(config["watchdog"]))
    state, history = ft.fit(
        ft.sharding.create(make, mesh, ft.sharding.fsdp(min_size=1)),
        ft.train_step(ft.supervised(ft.Model(None, apply), optax.squared_error), tx),
        ft.ArrayLoader((x, x[:, :1]), 16, shuffle=True, seed=1),
        epochs=EPOCHS,
        sharding=mesh,
        checkpointer=checkpointer,
        hooks=hooks,
        fuse=2,
        verbose=0,
    )
    part = state.params["w"].addressable_shards[0].data.shape
    params = multihost_utils.process_allgather(state.params["w"], tiled=True)
    result = [jax.process_count(), part[0], history.steps["loss"].tolist(), params.tobytes().hex()]
    (folder / f"end-{jax.process_index()}").write_text(json.dumps(result))


ENVIRONMENT = {
    "JAX_PLATFORMS": "cpu",  # the trainer connects its workers where this is set
    "PYTHONPATH": os.pathsep.join(
        [str(pathlib.Path(__file__).parents[2]), os.environ.get("PYTHONPATH", "")]
    ),
    "XLA_FLAGS": "--xla_force_host_platform_device_count=1",
}
SETTINGS = {
    "RAY_TRAIN_V2_ENABLED": "1",
    "RAY_TRAIN_HEALTH_CHECK_INTERVAL_S": "0.2",
    "JAX_DISTRIBUTED_SHUTDOWN_TIMEOUT_S": "3",
}


@pytest.fixture(scope="module", autouse=True)
def cluster() -> Iterator[None]:
    import ray

    with pytest.MonkeyPatch.context() as patch:
        for name, value in SETTINGS.items():
            patch.setenv(name, value)
        variables = {**ENVIRONMENT, **SETTINGS}
        ray.init(num_cpus=4, runtime_env={"env_vars": variables}, include_dashboard=False)
        try:
            yield
        finally:
            ray.shutdown()


def is_alive(pid: int) -> bool:
    """Returns True if a process exists and is not a zombie."""
    try:
        return pathlib.Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


class Training:
    """A training by two workers, in a folder."""

    def __init__(self, folder: pathlib.Path, **config: Any) -> None:
        folder.mkdir()
        self.folder, self.config = folder, {"folder": str(folder), **config}
        self.result: Any = None

    def run(self, max_failures: int = 0) -> "Training":
        """Trains, and keeps what Ray returns."""
        from ray.train import FailureConfig, RunConfig, ScalingConfig
        from ray.train.v2.jax import JaxConfig, JaxTrainer

        trainer = JaxTrainer(
            train,
            train_loop_config=self.config,
            jax_config=JaxConfig(use_gpu=True),
            scaling_config=ScalingConfig(num_workers=2, resources_per_worker={"CPU": 1}),
            run_config=RunConfig(
                storage_path=str(self.folder / "ray"),
                failure_config=FailureConfig(max_failures=max_failures),
            ),
        )
        self.result = trainer.fit()
        return self

    def pids(self, rank: int) -> list[int]:
        """Returns the process of each life of a worker."""
        file = self.folder / f"pids-{rank}"
        return [int(pid) for pid in file.read_text().split()] if file.exists() else []

    def has_ended(self) -> bool:
        """Returns True if a worker has left its fit."""
        return any(self.folder.glob("end-*"))

    def ends(self) -> list[Any]:
        """Returns the result of each worker: processes, rows of its part, losses, parameters."""
        return [json.loads((self.folder / f"end-{rank}").read_text()) for rank in (0, 1)]

    def losses(self) -> list[float]:
        """Returns the losses of all steps."""
        losses: list[float] = self.ends()[0][2]
        return losses

    def steps(self) -> list[int]:
        """Returns the steps of the checkpoints that Ray names."""
        return [int(metrics["step"]) for _, metrics in self.result.best_checkpoints]

    def survivors(self) -> list[int]:
        """Returns the processes that are still there some seconds after the end."""
        for _ in range(100):
            pids = [pid for rank in (0, 1) for pid in self.pids(rank) if is_alive(pid)]
            if not pids:
                break
            time.sleep(0.2)
        return pids


@pytest.fixture(scope="module")
def straight(tmp_path_factory: pytest.TempPathFactory) -> Training:
    return Training(tmp_path_factory.mktemp("ray") / "straight").run()


def test_a_fit_in_a_jax_trainer_spans_its_workers(straight: Training) -> None:
    first, second = straight.ends()
    assert first == second
    assert first[:2] == [2, 4]
    losses = straight.losses()
    assert losses[-1] < losses[0] / 2


def test_each_epoch_reaches_the_result_with_a_checkpoint_that_loads(straight: Training) -> None:
    import functrain as ft

    assert straight.steps() == ALL_STEPS
    losses = [float(metrics["loss"]) for _, metrics in straight.result.best_checkpoints]
    np.testing.assert_allclose(losses, np.reshape(straight.losses(), (EPOCHS, STEPS)).mean(1), 1e-6)
    for checkpoint, metrics in straight.result.best_checkpoints:
        like = ft.TrainState.create(params={"w": np.zeros((8, 1), np.float32)}, tx=adam())
        assert ft.load(checkpoint.get_metadata()["path"], like).step == metrics["step"]
        folder = pathlib.Path(checkpoint.path)
        assert sum(file.stat().st_size for file in folder.iterdir()) < 1_000  # a name, no copy


TROUBLES = {
    "is killed": {"trouble": signal.SIGKILL},
    "gets SIGTERM": {"trouble": signal.SIGTERM},
    "loops": {"trouble": "loop", "watchdog": 5},
    "is paused": {"trouble": signal.SIGSTOP, "watchdog": 5},
}


@pytest.mark.parametrize("rank", [pytest.param(0, marks=pytest.mark.long), 1])
@pytest.mark.parametrize("name", TROUBLES)
def test_where_a_worker_has_trouble_ray_starts_all_again_and_no_bit_differs(
    name: str, rank: int, straight: Training, tmp_path: pathlib.Path
) -> None:
    training = Training(tmp_path / "run", rank=rank, **TROUBLES[name]).run(max_failures=1)
    assert training.result.error is None
    assert [len(training.pids(rank)) for rank in (0, 1)] == [2, 2]
    assert training.ends() == straight.ends()
    assert training.steps() == ALL_STEPS
    assert training.survivors() == []


def test_a_stop_in_one_worker_stops_all_and_the_last_checkpoint_is_that_of_the_stop(
    straight: Training, tmp_path: pathlib.Path
) -> None:
    training = Training(tmp_path / "run", rank=1, trouble="stop").run()
    assert training.result.error is None
    first, second = training.ends()
    assert first == second
    stopped_at = len(training.losses())
    assert 14 <= stopped_at < EPOCHS * STEPS
    assert training.losses() == straight.losses()[:stopped_at]
    path = training.result.checkpoint.get_metadata()["path"]
    assert int(pathlib.Path(path).name) == training.result.metrics["step"] == stopped_at
    assert training.survivors() == []


def kill_now_and_then(training: Training, rng: random.Random, kills: int) -> int:
    """Kills a worker at a random moment of each of its lives; returns the number of kills."""
    for life in range(kills):
        while min(len(training.pids(rank)) for rank in (0, 1)) <= life:
            if training.result is not None:
                return life
            time.sleep(0.05)
        time.sleep(rng.uniform(0, 6))
        if training.has_ended():
            return life
        os.kill(training.pids(rng.randrange(2))[life], signal.SIGKILL)
    return kills


@pytest.mark.parametrize("kills", [1, pytest.param(20, marks=pytest.mark.long)])
def test_workers_killed_at_random_moments_cost_no_bit_and_no_report(
    kills: int, straight: Training, tmp_path: pathlib.Path
) -> None:
    rng, left, trainings = random.Random(kills), kills, 0
    while left:
        training, trainings = Training(tmp_path / str(trainings), pause=0.3), trainings + 1
        with futures.ThreadPoolExecutor() as pool:
            killed = pool.submit(kill_now_and_then, training, rng, min(left, 5))
            training.run(max_failures=-1)
        left -= killed.result()
        assert training.result.error is None
        assert training.ends() == straight.ends()
        # A kill after the last save may cost the reports that were under way.
        steps = training.steps()
        assert steps == ALL_STEPS[: max(len(steps), EPOCHS - 3)]
        assert training.survivors() == []
    print(f"{kills} kills in {trainings} trainings")
