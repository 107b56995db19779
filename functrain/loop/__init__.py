"""The loops: run, evaluate, predict.

Files:
  _run: a run as an iterator over its events
  _arguments: the arguments of a run, checked and converted once
  _loop: the training loop behind it: chunks, events, checkpoints
  _events: the events of a run, and logs that are read late
  _saving: saves a run
  _resuming: resumes a run from its last checkpoint
  _finite: warnings about losses that are not finite
  _passes: evaluate and predict, passes over data that leave the state alone
"""

from functrain.loop._events import ChunkEnd as ChunkEnd
from functrain.loop._events import EpochEnd as EpochEnd
from functrain.loop._events import Event as Event
from functrain.loop._events import RunEnd as RunEnd
from functrain.loop._passes import evaluate as evaluate
from functrain.loop._passes import predict as predict
from functrain.loop._run import Run as Run
from functrain.loop._run import run as run
