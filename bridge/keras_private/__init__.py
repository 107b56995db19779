"""Every private Keras name that the bridge uses: a file for each part of Keras, a function each.

No other file of the package touches one. `tests/bridge/keras_private/` has a test for each name,
which is the first to fail when a new Keras release moves it.

Files:
  trainer: what `compile` made of a model, what its epochs report, where its values are, and the
    data that tasks of keras_hub prepare
  data: the batches of everything that `fit` takes
  callbacks: the state of Keras's own callbacks, and the batches at which they act
  layers: what a layer holds, and the layers inside it
  variables: a variable's value and layout, and the scopes that hide it
  losses: what `compile` makes of a loss
  metrics: what `compile` makes of a metric
  optimizers: an optimizer's arguments and variables
"""

from bridge.keras_private import callbacks as callbacks
from bridge.keras_private import data as data
from bridge.keras_private import layers as layers
from bridge.keras_private import losses as losses
from bridge.keras_private import metrics as metrics
from bridge.keras_private import optimizers as optimizers
from bridge.keras_private import trainer as trainer
from bridge.keras_private import variables as variables
