"""What may happen around a loop: evaluation, early stopping, logs, and functions of your own.

Files:
  _hook: what a hook is, and who calls them
  _evaluate: evaluation in the midst of training
  _early_stopping: stopping when it no longer gets better
  _csv: values as a CSV file
  _text_file: a file of lines, which goes on where a checkpoint left it
"""

from functrain.hooks._csv import CSVLogger as CSVLogger
from functrain.hooks._early_stopping import EarlyStopping as EarlyStopping
from functrain.hooks._evaluate import Evaluate as Evaluate
from functrain.hooks._hook import Hook as Hook

__all__ = ["CSVLogger", "EarlyStopping", "Evaluate", "Hook"]
