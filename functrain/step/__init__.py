"""States, losses, and steps: what one batch does to a state."""

from functrain.step._eval import eval_step as eval_step
from functrain.step._eval import predict_step as predict_step
from functrain.step._loss import Aux as Aux
from functrain.step._loss import LossFn as LossFn
from functrain.step._metered import MeteredStep as MeteredStep
from functrain.step._state import TrainState as TrainState
from functrain.step._summary import summary as summary
from functrain.step._supervised import supervised as supervised
from functrain.step._train import train_step as train_step
from functrain.step._update import update as update

__all__ = [
    "Aux",
    "LossFn",
    "MeteredStep",
    "TrainState",
    "eval_step",
    "predict_step",
    "summary",
    "supervised",
    "train_step",
    "update",
]
