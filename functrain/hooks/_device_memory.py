"""The memory in use on the devices."""

import jax

from functrain.common import _repr
from functrain.engine._trigger import Every, Trigger, as_trigger
from functrain.loop._events import Event


class DeviceMemory:
    """A hook that adds the memory of the fullest device to the event's values.

    The values are ``memory/in_use``, ``memory/peak`` and ``memory/limit`` in bytes, as far as the
    device reports them. A CPU reports none. The hook does not wait for the device.

    Args:
      every: A number of steps, or a trigger such as ``ft.every(seconds=60)``. The end of each epoch
        by default.

    Examples:
      >>> from functrain import Position
      >>> from functrain.events import EpochEnd
      >>> event = EpochEnd(position=Position(step=10), state=())
      >>> DeviceMemory()(event)
      >>> set(event.values) <= {"memory/in_use", "memory/peak", "memory/limit"}
      True
    """

    def __init__(self, *, every: int | Trigger | None = None) -> None:
        self.every = as_trigger(every, Every(epochs=1))

    def __repr__(self) -> str:
        return _repr.call(self, every=self.every)

    def __call__(self, event: Event, /) -> None:
        """Adds the values."""
        device_stats = [device.memory_stats() or {} for device in jax.local_devices()]
        for name, key in _STATS_KEYS.items():
            byte_counts = [stats[key] for stats in device_stats if key in stats]
            if byte_counts:
                event.values[f"memory/{name}"] = float(max(byte_counts))


# The names in jax's memory_stats.
_STATS_KEYS = {"in_use": "bytes_in_use", "peak": "peak_bytes_in_use", "limit": "bytes_limit"}
