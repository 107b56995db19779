"""Several processes: how they find each other, and how to start some on one machine.

Files:
  _initialize: connects this process with the others, if there are others
  _ending: how a process ends that failed
  _launch: starts processes on this machine, and starts them again
"""

from functrain.distributed._initialize import initialize as initialize

__all__ = ["initialize"]
