"""Optimizers, schedules, losses, metrics and constraints, both ways.

Files:
  _optimizers: a Keras optimizer as an optax transformation
  _wrapped: the same by Keras's own code
  _native: the same in optax's own pieces
  _slots: what an optimizer remembers, and to which parameter each part belongs
  _optax_optimizer: an optax transformation as a Keras optimizer
  _schedules: learning rate schedules, both ways
  _constraints: a Keras model's constraints, kept by optax
  _losses: Keras losses in optax's argument order
  _metrics: Keras metrics as functrain metrics
"""

from bridge.optim._constraints import constraints as constraints
from bridge.optim._losses import loss as loss
from bridge.optim._metrics import metric as metric
from bridge.optim._optax_optimizer import OptaxOptimizer as OptaxOptimizer
from bridge.optim._optimizers import optimizer as optimizer
from bridge.optim._schedules import schedule as schedule
