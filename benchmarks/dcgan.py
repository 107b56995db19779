"""The DCGAN of `examples/dcgan.py`, as a workload: two networks and two optimizers in one step."""

import importlib.util
import pathlib
from typing import Any

import bridge
from benchmarks.workloads import draw_kernels

EXAMPLE = pathlib.Path(__file__).parents[1] / "examples" / "dcgan.py"


def make() -> tuple[Any, Any]:
    """Returns the two states, and the step that updates both."""
    spec = importlib.util.spec_from_file_location("dcgan", EXAMPLE)
    assert spec is not None
    assert spec.loader is not None
    example = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(example)
    nets, txs, states = example.create()
    for name, net in nets.items():
        # Kernels that other libraries can draw, too.
        draw_kernels(net)
        states[name] = bridge.create_state(net, txs[name], rng=states[name].rng)
    gan_step = example.gan_step(nets, txs)

    def step(states: Any, batch: Any) -> tuple[Any, Any]:
        # The example expects pixels from 0 to 255 and scales them itself.
        states, logs = gan_step(states, 255 * batch[0])
        return states, {"loss": logs["d_loss"], "generator_loss": logs["g_loss"]}

    return states, step
