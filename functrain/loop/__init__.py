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
