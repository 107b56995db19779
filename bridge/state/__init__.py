"""Conversions between a Keras model's variables and states.

Files:
  _create_state: a TrainState with a Keras model's variables
  _keras_state: Keras's own state of a compiled model, as arrays
  _to_keras: writes a state into its Keras model
  _warm_start: takes part of a state from a file that Keras wrote
  _distribution: conversions between keras.distribution's layouts and sharding rules
  _transfer: conversions between a compiled optimizer's variables and a state of optax
"""

from bridge.state._create_state import create_state as create_state
from bridge.state._distribution import Placement as Placement
from bridge.state._distribution import from_distribution as from_distribution
from bridge.state._distribution import to_distribution as to_distribution
from bridge.state._keras_state import KerasState as KerasState
from bridge.state._keras_state import keras_state as keras_state
from bridge.state._to_keras import to_keras as to_keras
from bridge.state._warm_start import warm_start as warm_start
