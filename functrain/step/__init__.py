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
  _dropped_state: a warning of losses that drop the new model state
  _notes: the shapes of its batch, as a note on an error of a step
"""
