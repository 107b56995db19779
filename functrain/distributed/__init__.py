"""Several processes: connecting them, and starting them on one machine.

Files:
  _initialize: connects this process to the others, if there are others
  _stopping: agreement of the processes of a run on the event after which it stops
  _coordination: key-value store of JAX's coordination service, and other private names of JAX
  _launch: starts processes on this machine, and restarts them
"""

from functrain.data._local import local as local
from functrain.distributed._initialize import initialize as initialize

__all__ = ["initialize", "local"]
