"""Several processes: how they find each other, and how to start some on one machine.

Files:
  _initialize: connects this process with the others, if there are others
  _ending: how a process ends that failed
  _stopping: the processes of a run agree on the event after which it stops
  _coordination: key-value store and barriers of JAX's coordination service
  _jax_private: the private names of JAX in functrain
  _local: data of which each process has a part
  _launch: starts processes on this machine, and starts them again
"""

from functrain.distributed._initialize import initialize as initialize
from functrain.distributed._local import local as local

__all__ = ["initialize", "local"]
