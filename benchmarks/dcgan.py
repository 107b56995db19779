"""The DCGAN of `examples/dcgan.py`, as a workload: two networks, two optimizers, one step."""

import importlib.util
import pathlib
from typing import Any

EXAMPLE = pathlib.Path(__file__).parents[1] / "examples" / "dcgan.py"


def make() -> tuple[Any, Any]:
    """Returns the two states and the step over both."""
    spec = importlib.util.spec_from_file_location("dcgan", EXAMPLE)
    assert spec is not None
    assert spec.loader is not None
    example = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(example)
    nets, txs, states = example.create()
    gan_step = example.gan_step(nets, txs)

    def step(states: Any, batch: Any) -> tuple[Any, Any]:
        states, logs = gan_step(states, 255 * batch[0])  # it takes bytes and scales them itself
        return states, {"loss": logs["d_loss"], "generator_loss": logs["g_loss"]}

    return states, step
