"""Conversion of optimizers, schedules, losses, metrics and constraints.

Files:
  _optimizers: a Keras optimizer as an optax transformation that runs Keras's own code
  _slots: the roles of an optimizer's variables, and the parameters that they belong to
  _optax_optimizer: an optax transformation as a Keras optimizer
  _plain_data: arguments of optax's functions as plain data for Keras files
  _schedules: learning rate schedules, from Keras to optax and back
  _constraints: a Keras model's constraints as an optax transformation
  _losses: Keras losses in optax's argument order
  _metrics: Keras metrics as functrain metrics
"""
