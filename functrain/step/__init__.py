"""States, losses, and steps: how one batch changes a state.

Files:
  _state: TrainState
  _loss: LossFn, and Aux, which a loss returns beside its value
  _supervised: the loss of a model on inputs and labels
  _update: one gradient step
  _micro_batches: gradients of large batches, accumulated over small ones
  _train: the training step
  _eval: the steps for evaluation and prediction
  _metered: steps with and without running metrics
  _check: checks of steps, losses and the names of logs
  _notes: the shapes of its batch, as a note on an error of a step
"""

from functrain.step._eval import eval_step as eval_step
from functrain.step._eval import predict_step as predict_step
from functrain.step._loss import Aux as Aux
from functrain.step._loss import LossFn as LossFn
from functrain.step._metered import MeteredStep as MeteredStep
from functrain.step._micro_batches import micro_batches as micro_batches
from functrain.step._state import TrainState as TrainState
from functrain.step._state import step_key as step_key
from functrain.step._supervised import supervised as supervised
from functrain.step._train import train_step as train_step
from functrain.step._update import update as update
