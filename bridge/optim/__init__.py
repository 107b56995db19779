"""Conversion of optimizers, schedules, losses, metrics and constraints.

Files:
  _optimizers: a Keras optimizer as an optax transformation
  _wrapped: that transformation, running Keras's own code
  _slots: the roles of an optimizer's variables, and the parameters that they belong to
  _optax_optimizer: an optax transformation as a Keras optimizer
  _plain_data: functions of optax and their arguments as plain data for Keras files
  _schedules: learning rate schedules, from Keras to optax and back
  _constraints: a Keras model's constraints as an optax transformation
  _losses: Keras losses in optax's argument order
  _metrics: Keras metrics as functrain metrics
"""

from bridge.optim._constraints import constraints as constraints
from bridge.optim._losses import loss as loss
from bridge.optim._metrics import metric as metric
from bridge.optim._optax_optimizer import OptaxOptimizer as OptaxOptimizer
from bridge.optim._optimizers import optimizer as optimizer
from bridge.optim._schedules import schedule as schedule
