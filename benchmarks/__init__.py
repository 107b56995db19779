"""Benchmarks that compare functrain with Keras, flax and loops written by hand."""
