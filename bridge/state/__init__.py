"""Conversions between a Keras model's variables and states.

Files:
  _create_state: a TrainState with a Keras model's variables
  _keras_state: Keras's own state of a compiled model, as arrays
  _to_keras: writes a state into its Keras model
  _warm_start: takes part of a state from a file that Keras wrote
  _distribution: conversions between keras.distribution's layouts and sharding rules
  _transfer: conversions between a compiled optimizer's variables and a state of optax
"""
