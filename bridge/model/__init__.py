"""Keras models as pure functions, flax modules as Keras layers."""
