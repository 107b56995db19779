"""Keras models as pure functions, flax modules as Keras layers.

Files:
  _from_keras: a Keras model as a functrain Model
  _to_linen: a Keras model as a linen module
  _from_flax: a flax module as a Keras layer
  _variables: which variable is which
  _names: what a variable is called
  _reach: which steps can touch an object of Keras
  _scope: a model as a pure function, left whole whatever happens
  _pure_layers: which layers may be compiled although they say they may not
  _flax_modules: one interface to linen and to nnx
  _plain_data: flax modules, functions and their arguments in Keras's files
"""

from bridge.model._from_flax import from_flax as from_flax
from bridge.model._from_keras import from_keras as from_keras
from bridge.model._to_linen import to_linen as to_linen
