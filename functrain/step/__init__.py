"""States, losses, and steps: what one batch does to a state.

Files:
  _state: TrainState
  _loss: LossFn, and Aux, what a loss returns beside its value
  _supervised: the loss of a model on inputs and labels
  _update: one gradient step
  _micro_batches: large batches in little memory
  _train: the step that trains
  _eval: the steps that evaluate and predict
  _metered: steps that carry running metrics
  _check: checks of steps, losses and names of logs
"""

from functrain.step._eval import eval_step as eval_step
from functrain.step._eval import predict_step as predict_step
from functrain.step._loss import Aux as Aux
from functrain.step._loss import LossFn as LossFn
from functrain.step._metered import MeteredStep as MeteredStep
from functrain.step._micro_batches import micro_batches as micro_batches
from functrain.step._state import TrainState as TrainState
from functrain.step._supervised import supervised as supervised
from functrain.step._train import train_step as train_step
from functrain.step._update import update as update
