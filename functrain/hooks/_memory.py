"""How full devices are."""

import jax

from functrain.common import _repr
from functrain.engine._trigger import Trigger, every
from functrain.loop._events import Event


class Memory:
    """A hook that adds the memory of the fullest device to the event's values.

    ``memory/in_use``, ``memory/peak`` and ``memory/limit`` in bytes, those that the device counts.
    A CPU counts none. It waits for nothing.

    Args:
      when: A trigger; each epoch by default.

    Examples:
      >>> from functrain import EpochEnd, Position
      >>> event = EpochEnd(position=Position(step=10), state=())
      >>> Memory()(event)
      >>> set(event.values) <= {"memory/in_use", "memory/peak", "memory/limit"}
      True
    """

    def __init__(self, *, when: Trigger | None = None) -> None:
        self.when = every(epochs=1) if when is None else when

    def __repr__(self) -> str:
        return _repr.call(self, when=self.when)

    def __call__(self, event: Event, /) -> None:
        """Adds the values."""
        counts = [device.memory_stats() or {} for device in jax.local_devices()]
        for name, theirs in _NAMES.items():
            if found := [count[theirs] for count in counts if theirs in count]:
                event.values[f"memory/{name}"] = float(max(found))


_NAMES = {"in_use": "bytes_in_use", "peak": "peak_bytes_in_use", "limit": "bytes_limit"}
