"""Every private Keras name the bridge reads: a file for each part of Keras, a function each.

Nothing else in the package touches one; `tests/bridge/keras_private/` holds a test for each, which
says first when a new Keras release moves something.

Files:
  _trainer: what `compile` made of a model, and what its epochs report
  _trainer_state: where a model's values are while it trains
  _compile: what `compile` was asked for
  _data: the batches of whatever `fit` takes
  _callbacks: when Keras's own callbacks act between two epochs
  _layers: what a layer holds, and the layers inside it
  _variables: a variable's value and place
  _losses: what `compile` makes of a loss
  _metrics: what `compile` makes of a metric
  _optimizers: what an optimizer was made with, and what it remembers
"""

from bridge.keras_private._callbacks import batches_between as batches_between
from bridge.keras_private._callbacks import batches_until_due as batches_until_due
from bridge.keras_private._callbacks import memory as memory
from bridge.keras_private._callbacks import only_epochs as only_epochs
from bridge.keras_private._callbacks import put_memory as put_memory
from bridge.keras_private._compile import jit_compile_asked as jit_compile_asked
from bridge.keras_private._data import ArrayBatches as ArrayBatches
from bridge.keras_private._data import array_batches as array_batches
from bridge.keras_private._data import described as described
from bridge.keras_private._data import epochs as epochs
from bridge.keras_private._data import go_to as go_to
from bridge.keras_private._data import place as place
from bridge.keras_private._data import split as split
from bridge.keras_private._data import whole_batches as whole_batches
from bridge.keras_private._layers import all_layers as all_layers
from bridge.keras_private._layers import forget_losses as forget_losses
from bridge.keras_private._layers import is_functional as is_functional
from bridge.keras_private._layers import own_metrics as own_metrics
from bridge.keras_private._layers import own_variables as own_variables
from bridge.keras_private._layers import seed_generators as seed_generators
from bridge.keras_private._layers import sublayers as sublayers
from bridge.keras_private._losses import get_loss as get_loss
from bridge.keras_private._losses import losses_and_weight as losses_and_weight
from bridge.keras_private._metrics import get_metric as get_metric
from bridge.keras_private._metrics import is_built_metric as is_built_metric
from bridge.keras_private._metrics import only_running_means as only_running_means
from bridge.keras_private._optimizers import GradientsOnly as GradientsOnly
from bridge.keras_private._optimizers import (
    excluded_from_weight_decay as excluded_from_weight_decay,
)
from bridge.keras_private._optimizers import learning_rate as learning_rate
from bridge.keras_private._optimizers import optimizer_map as optimizer_map
from bridge.keras_private._optimizers import slot_lists as slot_lists
from bridge.keras_private._optimizers import trained as trained
from bridge.keras_private._optimizers import variable_attributes as variable_attributes
from bridge.keras_private._trainer import build as build
from bridge.keras_private._trainer import build_from as build_from
from bridge.keras_private._trainer import compiled_parts as compiled_parts
from bridge.keras_private._trainer import epoch_logs as epoch_logs
from bridge.keras_private._trainer import in_order as in_order
from bridge.keras_private._trainer import initial_epoch as initial_epoch
from bridge.keras_private._trainer import is_built as is_built
from bridge.keras_private._trainer import is_trainer as is_trainer
from bridge.keras_private._trainer_state import is_synced as is_synced
from bridge.keras_private._trainer_state import publish as publish
from bridge.keras_private._trainer_state import purge as purge
from bridge.keras_private._trainer_state import sync as sync
from bridge.keras_private._variables import global_seed as global_seed
from bridge.keras_private._variables import layout as layout
from bridge.keras_private._variables import other_values as other_values
from bridge.keras_private._variables import outside_scopes as outside_scopes
from bridge.keras_private._variables import put_global_seed as put_global_seed
from bridge.keras_private._variables import swap_value as swap_value
