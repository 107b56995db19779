"""A model's variables as a state, and back.

Files:
  _create_state: a Keras model's variables as a TrainState
  _keras_state: Keras's own state of a compiled model, as arrays
  _to_keras: a state written back into its Keras model
  _warm_start: a part of a state out of a file that Keras wrote
  _distribution: keras.distribution's layouts as rules, and back
  _transfer: what a compiled optimizer remembers, as a state of optax, and back
"""

from bridge.state._create_state import create_state as create_state
from bridge.state._distribution import from_distribution as from_distribution
from bridge.state._distribution import to_distribution as to_distribution
from bridge.state._keras_state import KerasState as KerasState
from bridge.state._keras_state import keras_state as keras_state
from bridge.state._to_keras import to_keras as to_keras
from bridge.state._warm_start import warm_start as warm_start
