"""Steps, examples, tokens and operations a second, and the memory of the devices."""

import dataclasses
import time
from typing import ClassVar

import jax

from functrain.common._checks import is_positive, require
from functrain.common._log_values import Unshown
from functrain.engine._trigger import Every, Trigger, as_trigger
from functrain.loop._events import ChunkEnd, Event
from functrain.targets._chips import known_chip

# Progress lines have steps or examples a second anyway.
_SHOWN = ("tokens", "utilization")


@dataclasses.dataclass(eq=False)
class Throughput:
    """A hook that adds the speed of the training and the memory in use to the event's values.

    The speed is that since the hook was last due, with everything that the training did in this
    time, such as evaluating and saving. The first program, which includes compilation, does not
    count. A step counts when its logs have arrived from the device, so that the hook does not wait
    for the device.

    These values are per second:

    - ``throughput/steps`` and ``throughput/examples``;
    - ``throughput/tokens``, with `tokens_per_example`;
    - ``throughput/flops``, with `flops_per_step`, and ``throughput/utilization``, the part of the
      peak of all devices in bfloat16, for devices whose peak is known. For the operations of the
      model alone, without those that are repeated to save memory, this is the model FLOP/s
      utilization (MFU) of Chowdhery et al., "PaLM", 2022.

    They are left out as long as no program has been timed. ``memory/in_use``, ``memory/peak`` and
    ``memory/limit`` are the bytes of the fullest device of this process, as far as it reports them.
    A CPU reports none.

    Args:
      every: A number of steps, or a trigger such as ``ft.every(seconds=60)``. The end of each epoch
        by default.
      tokens_per_example: The length of the sequences.
      flops_per_step: The operations of a step on all devices, such as
        ``ft.inspect.cost(state, step, batch).flops``: those of products and convolutions. With
        `jax.checkpoint` it contains those that are repeated; for the MFU, pass that of the step
        without it.

    Raises:
      ValueError: `tokens_per_example` or `flops_per_step` is not a positive number.

    Examples:
      >>> import functrain as ft, jax.numpy as jnp
      >>> hook = Throughput(every=64, tokens_per_example=128)
      >>> def step(count, batch):
      ...     return count + 1, {"loss": jnp.sum(batch)}
      >>> data = ft.ArrayLoader(jnp.ones((1024, 8)), 4)
      >>> _, history = ft.fit(0, step, data, hooks=[hook], fuse=32, verbose=0)
      >>> sorted(history.within_epochs)
      ['throughput/examples', 'throughput/steps', 'throughput/tokens']
    """

    _: dataclasses.KW_ONLY
    every: int | Trigger | None = None
    tokens_per_example: int | None = None
    flops_per_step: float | None = None

    # One process reports for all.
    only_first: ClassVar[bool] = True

    def __post_init__(self) -> None:
        self.every = as_trigger(self.every, Every(epochs=1))
        for name in ("tokens_per_example", "flops_per_step"):
            value = getattr(self, name)
            require(value is None or is_positive(value), name, "a positive number", value)
        self._clock = time.perf_counter
        self.begin()

    def begin(self) -> None:
        """Forgets an earlier run."""
        # The time at which the last counted step had ended, and that from which steps count.
        self._latest = 0.0
        self._since: float | None = None
        self._steps = self._examples = 0

    def logs(self, event: ChunkEnd, /) -> None:
        """Counts the steps of a chunk, which have ended."""
        self._latest = self._clock()
        if self._since is None:
            self._since = self._latest
        else:
            self._steps += event.steps
            self._examples += event.steps * event.examples

    def __call__(self, event: Event, /) -> None:
        """Adds the values."""
        event.values.update(_memory())
        if self._steps == 0 or self._since is None:
            return
        seconds = self._latest - self._since
        rates = {"steps": self._steps / seconds, "examples": self._examples / seconds}
        if self.tokens_per_example is not None:
            rates["tokens"] = rates["examples"] * self.tokens_per_example
        if self.flops_per_step is not None:
            rates["flops"] = rates["steps"] * self.flops_per_step
            if peak := _peak_flops(event.state):
                rates["utilization"] = rates["flops"] / peak
        for name, rate in rates.items():
            kind = str if name in _SHOWN else Unshown
            event.values[kind(f"throughput/{name}")] = rate
        self._since, self._steps, self._examples = self._latest, 0, 0


def _memory() -> dict[str, float]:
    """Returns the bytes of the fullest device, by the names of the values."""
    keys = {"in_use": "bytes_in_use", "peak": "peak_bytes_in_use", "limit": "bytes_limit"}
    device_stats = [device.memory_stats() or {} for device in jax.local_devices()]
    values = {name: max(x.get(key, 0) for x in device_stats) for name, key in keys.items()}
    return {f"memory/{name}": float(value) for name, value in values.items() if value}


def _peak_flops(state: object) -> float:
    """Returns the peak of all devices that hold a state, in operations a second; 0 if unknown."""
    devices = {d for x in jax.tree.leaves(state) if isinstance(x, jax.Array) for d in x.devices()}
    chips = [known_chip(device.device_kind) for device in devices]
    return sum(chip.peak_flops for chip in chips if chip is not None)
