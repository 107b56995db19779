"""fit: a run with hooks, evaluation, progress and history.

Files:
  _fit: the training loop
  _ahead: checks before the first step
  _history: logs of steps and values of epochs, and their display in a notebook
  _recorder: collects the history during a run
  _bar: a progress bar
  _progress: reports progress, as a bar in a terminal or notebook, and as lines elsewhere
  _plot: learning curves
"""
