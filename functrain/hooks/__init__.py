"""What may happen around a loop: evaluation, early stopping, logs, and functions of your own."""

from functrain.hooks._csv import CSVLogger as CSVLogger
from functrain.hooks._early_stopping import EarlyStopping as EarlyStopping
from functrain.hooks._evaluate import Evaluate as Evaluate
from functrain.hooks._hook import Hook as Hook

__all__ = ["CSVLogger", "EarlyStopping", "Evaluate", "Hook"]
