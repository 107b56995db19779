"""Keras models as pure functions, and flax modules as Keras layers.

Files:
  _from_keras: a Keras model as a functrain Model, and as a linen module
  _from_flax: a flax module as a Keras layer
  _variables: a model's variables as nested dicts, and back
  _names: stable names of variables
  _scope: running a model as a pure function without damage to its variables
  _pure_layers: layers with supports_jit=False: which JAX can compile, and which draw in Python
  _flax_modules: one interface to linen and nnx modules
  _functions: functions by the names that files of Keras have for them
"""
