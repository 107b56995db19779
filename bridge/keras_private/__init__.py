"""Every private Keras name the bridge reads: a file for each part of Keras, a function each.

Nothing else in the package touches one; `tests/bridge/keras_private/` holds a test for each, which
says first when a new Keras release moves something.

Files:
  trainer: what `compile` made of a model, and what its epochs report
  trainer_state: where a model's values are while it trains
  data: the batches of whatever `fit` takes
  callbacks: when Keras's own callbacks act between two epochs
  layers: what a layer holds, and the layers inside it
  variables: a variable's value and place
  losses: what `compile` makes of a loss
  metrics: what `compile` makes of a metric
  optimizers: what an optimizer was made with, and what it remembers
"""

from bridge.keras_private import callbacks as callbacks
from bridge.keras_private import data as data
from bridge.keras_private import layers as layers
from bridge.keras_private import losses as losses
from bridge.keras_private import metrics as metrics
from bridge.keras_private import optimizers as optimizers
from bridge.keras_private import trainer as trainer
from bridge.keras_private import trainer_state as trainer_state
from bridge.keras_private import variables as variables
