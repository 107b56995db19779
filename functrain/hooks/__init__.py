"""Hooks called during a run: evaluation, early stopping, logs, and your own functions.

Files:
  _hook: the protocol of hooks, and their runner
  _evaluate: evaluation during training
  _early_stopping: stopping when a value no longer improves
  _reduce_lr_on_plateau: a lower learning rate when a value no longer improves
  _terminate_on_nan: stopping when a loss is no longer finite
  _sample: pictures and texts on a schedule
  _profile: a trace of some steps
  _throughput: steps, examples, tokens and operations a second; memory in use
  _goodput: how the time of a run divides into steps and everything else
  _watchdog: the end of a run that makes no progress, with the stacks of all threads
  _logger: the base class of loggers, which write without waiting for the device
  _text_logs: values as a CSV file, and as JSON lines
  _tensorboard: values, pictures and texts for TensorBoard
  _tracker: the base class of loggers that continue a run of an experiment tracker
  _wandb: values, pictures and texts for Weights & Biases
  _mlflow: the same for MLflow
  _trackio: the same for Trackio
  _comet: the same for Comet
  _ray: values and the names of checkpoints for Ray Train
"""

from functrain.hooks._comet import Comet as Comet
from functrain.hooks._early_stopping import EarlyStopping as EarlyStopping
from functrain.hooks._evaluate import Evaluate as Evaluate
from functrain.hooks._goodput import Goodput as Goodput
from functrain.hooks._hook import Hook as Hook
from functrain.hooks._mlflow import MLflow as MLflow
from functrain.hooks._profile import Profile as Profile
from functrain.hooks._ray import RayReport as RayReport
from functrain.hooks._reduce_lr_on_plateau import ReduceLROnPlateau as ReduceLROnPlateau
from functrain.hooks._sample import Sample as Sample
from functrain.hooks._tensorboard import TensorBoard as TensorBoard
from functrain.hooks._terminate_on_nan import TerminateOnNaN as TerminateOnNaN
from functrain.hooks._text_logs import CSVLogger as CSVLogger
from functrain.hooks._text_logs import JSONLines as JSONLines
from functrain.hooks._throughput import Throughput as Throughput
from functrain.hooks._tracker import Tracker as Tracker
from functrain.hooks._trackio import Trackio as Trackio
from functrain.hooks._wandb import WandB as WandB
from functrain.hooks._watchdog import Watchdog as Watchdog

__all__ = [
    "CSVLogger",
    "Comet",
    "EarlyStopping",
    "Evaluate",
    "Goodput",
    "Hook",
    "JSONLines",
    "MLflow",
    "Profile",
    "RayReport",
    "ReduceLROnPlateau",
    "Sample",
    "TensorBoard",
    "TerminateOnNaN",
    "Throughput",
    "Tracker",
    "Trackio",
    "WandB",
    "Watchdog",
]
