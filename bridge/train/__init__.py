"""fit, evaluate, predict: Keras's loops over programs of many steps."""
