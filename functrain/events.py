"""The events of a run, which hooks receive and ``for event in ft.run(...)`` yields.

Examples:
  >>> import functrain as ft
  >>> def report(event):
  ...     if isinstance(event, ft.events.EpochEnd):
  ...         print(event.position, event.values)
"""

from functrain.engine._trigger import Trigger as Trigger
from functrain.loop._events import ChunkEnd as ChunkEnd
from functrain.loop._events import EpochEnd as EpochEnd
from functrain.loop._events import Event as Event
from functrain.loop._events import RunEnd as RunEnd

__all__ = ["ChunkEnd", "EpochEnd", "Event", "RunEnd", "Trigger"]
