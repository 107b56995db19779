"""fit, evaluate and predict: Keras's loops over programs of many steps.

Files:
  _fit: the three functions, with the arguments of Keras's methods
  _checks: checks of their arguments, before the first callback and step
  _runs: runs of functrain with a model's state, steps, batches and callbacks
  _hook: the hook that calls Keras's callbacks
  _callbacks: the callbacks' batch methods, which callbacks are called, and loggers among them
  _memory: the states of callbacks and random generators in a checkpoint
  _batches: batches of everything that `fit` accepts
  _steps: a compiled model's steps as functrain steps, and its values, which its variables or a
    run have, one at a time
  _reports: the memory and the cost of training on devices that need not be there
"""
