"""The loops: run, evaluate, predict.

Files:
  _run: a run, event by event
  _loop: the loop itself: chunks, what is told of them, and what is saved
  _events: what happens in a run
  _saving: a run that saves itself, and where it goes on
  _finite: losses that are not finite
  _preemption: SIGTERM where there are several processes
  _evaluate: a pass over data that measures a state
  _predict: a pass over data that collects a model's outputs
  _require: what all three ask of a state, of a step and of the data
"""

from functrain.loop._evaluate import evaluate as evaluate
from functrain.loop._events import ChunkEnd as ChunkEnd
from functrain.loop._events import EpochEnd as EpochEnd
from functrain.loop._events import Event as Event
from functrain.loop._events import LogsReady as LogsReady
from functrain.loop._events import RunEnd as RunEnd
from functrain.loop._predict import predict as predict
from functrain.loop._run import Run as Run
from functrain.loop._run import run as run
