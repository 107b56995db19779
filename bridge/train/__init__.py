"""fit, evaluate, predict: Keras's loops over programs of many steps.

Files:
  _fit: the three, with the arguments of Keras's own
  _checks: checks of their arguments, before anything is done
  _runs: runs of functrain with a model's state, steps, batches and callbacks
  _hook: the hook that calls Keras's callbacks
  _memory: what callbacks remember in a checkpoint
  _model_values: the model's values while a run has them
  _steps: a compiled model's own steps
  _batches: batches of whatever `fit` takes
  _callbacks: who is called, with what, and when
  _loggers: loggers of functrain among the callbacks
  _compiling: programs of a model: its steps, and the means of its metrics
  _carried: metrics that a layer updates inside its `call`
"""

from bridge.train._fit import evaluate as evaluate
from bridge.train._fit import fit as fit
from bridge.train._fit import predict as predict
from bridge.train._steps import test_step as test_step
from bridge.train._steps import train_step as train_step
