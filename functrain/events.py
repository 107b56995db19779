"""The events of a run, which hooks receive and ``for event in ft.run(...)`` yields.

Examples:
  >>> import functrain as ft
  >>> def report(event):
  ...     if isinstance(event, ft.events.EpochEnd):
  ...         print(event.position, event.values)
"""

from functrain.engine import Trigger as Trigger
from functrain.loop import ChunkEnd as ChunkEnd
from functrain.loop import EpochEnd as EpochEnd
from functrain.loop import Event as Event
from functrain.loop import RunEnd as RunEnd

__all__ = ["ChunkEnd", "EpochEnd", "Event", "RunEnd", "Trigger"]
