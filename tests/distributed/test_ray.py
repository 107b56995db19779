"""A run within ray.train's JaxTrainer, on workers that have but CPUs: `make test-ray`."""

import importlib.util
import json
import os
import pathlib
from typing import Any

import pytest

pytestmark = [
    pytest.mark.ray,
    pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="needs ray"),
    pytest.mark.filterwarnings("ignore"),  # Ray's own
]


def train(config: dict[str, Any]) -> None:
    """What one worker does."""
    import jax
    import numpy as np
    import optax

    import functrain as ft

    ft.distributed.initialize()  # Ray has done it: this does nothing
    mesh = ft.sharding.mesh({"data": -1})
    tx = optax.adam(0.1)
    x = np.random.default_rng(0).normal(size=(64, 8)).astype(np.float32)

    def apply(params: Any, model_state: Any, x: Any, **how: Any) -> Any:
        return ft.ModelOutput(x @ params["w"], model_state)

    def make() -> ft.TrainState:
        return ft.TrainState.create(params={"w": np.zeros((8, 1), np.float32)}, tx=tx)

    loss_fn = ft.supervised(ft.Model(None, apply), optax.squared_error)
    state, history = ft.fit(
        ft.sharding.create(make, mesh, ft.sharding.fsdp(min_size=1)),
        ft.train_step(loss_fn, tx),
        ft.ArrayLoader((x, x[:, :1]), 16),
        epochs=5,
        sharding=mesh,
        checkpointer=ft.Checkpointer(config["folder"]),
        verbose=0,
    )
    losses = [float(loss) for loss in history.epochs["loss"]]
    part = state.params["w"].addressable_shards[0].data.shape
    found = {"processes": jax.process_count(), "losses": losses, "part": part[0]}
    if jax.process_index() == 0:  # Ray keeps what is reported beside checkpoints of its own alone
        pathlib.Path(config["folder"], "found.json").write_text(json.dumps(found))


def test_a_fit_in_a_jax_trainer_spans_its_workers(tmp_path: pathlib.Path) -> None:
    import ray
    from ray.train import RunConfig, ScalingConfig
    from ray.train.v2.jax import JaxConfig, JaxTrainer

    root = str(pathlib.Path(__file__).parents[2])
    environment = {
        "JAX_PLATFORMS": "cpu",  # the trainer connects its workers where this is said
        "PYTHONPATH": os.pathsep.join([root, os.environ.get("PYTHONPATH", "")]),
        "XLA_FLAGS": "--xla_force_host_platform_device_count=1",
        "RAY_TRAIN_V2_ENABLED": "1",
    }
    os.environ["RAY_TRAIN_V2_ENABLED"] = "1"
    ray.init(num_cpus=4, runtime_env={"env_vars": environment}, include_dashboard=False)
    try:
        trainer = JaxTrainer(
            train,
            train_loop_config={"folder": str(tmp_path / "checkpoints")},
            jax_config=JaxConfig(use_gpu=True),
            scaling_config=ScalingConfig(num_workers=2, resources_per_worker={"CPU": 1}),
            run_config=RunConfig(storage_path=str(tmp_path / "ray")),
        )
        assert trainer.fit().error is None
    finally:
        ray.shutdown()
    found = json.loads((tmp_path / "checkpoints" / "found.json").read_text())
    assert found["processes"] == 2
    assert found["part"] == 4
    assert found["losses"][-1] < found["losses"][0] / 2
    assert [path for path in (tmp_path / "checkpoints").iterdir() if path.name.isdecimal()]
