"""How full devices are."""

import jax

from functrain.common import _repr
from functrain.engine._trigger import Every, Trigger, as_trigger
from functrain.loop._events import Event


class DeviceMemory:
    """A hook that adds the memory of the fullest device to the event's values.

    ``memory/in_use``, ``memory/peak`` and ``memory/limit`` in bytes, those that the device counts.
    A CPU counts none. It waits for nothing.

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
        counts = [device.memory_stats() or {} for device in jax.local_devices()]
        for name, theirs in _NAMES.items():
            if found := [count[theirs] for count in counts if theirs in count]:
                event.values[f"memory/{name}"] = float(max(found))


_NAMES = {"in_use": "bytes_in_use", "peak": "peak_bytes_in_use", "limit": "bytes_limit"}
