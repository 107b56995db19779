"""fit, evaluate, predict: Keras's loops over programs of many steps.

Files:
  _fit: the three, with the arguments of Keras's own
  _checks: what they refuse
  _validation: data that no evaluation can take, found before training
  _runs: one call of them, the loop over epochs
  _saving: a fit that saves itself, and goes on
  _processes: what several processes may do, who writes
  _loop: one pass, a model's state on its way through the engine
  _steps: a compiled model's own steps
  _feed: batches of whatever `fit` takes
  _callbacks: who is called, with what, and when
  _loggers: loggers of functrain among the callbacks
  _compiling: whether a step is compiled
  _cached: what was compiled for a model
  _carried: metrics that a layer updates inside its `call`
  _running_means: metrics reset and read in one program each
"""

from bridge.train._fit import evaluate as evaluate
from bridge.train._fit import fit as fit
from bridge.train._fit import predict as predict
from bridge.train._steps import test_step as test_step
from bridge.train._steps import train_step as train_step
