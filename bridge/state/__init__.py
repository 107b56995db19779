"""Conversions between a Keras model's variables and states.

Files:
  _train_state: a TrainState with a Keras model's variables, and back
  _keras_state: Keras's own state of a compiled model, as arrays
  _warm_start: takes part of a state from a file that Keras wrote
  _distribution: conversions between keras.distribution's layouts and sharding rules
  _transfer: conversions between a compiled optimizer's variables and a state of optax
"""
