"""Batches, from anywhere.

Files:
  _batches: the protocol between data and the engine; Steps, for training without data
  _adapt: from what users pass to that protocol
  _loader: ArrayLoader, batches of arrays in memory
  _iterator: batches of any iterable
  _iterator_position: where an iterator is, to be saved and restored
  _same_data: recognizes the data of a run that resumes
  _local: data of which each process has a part
  _epochs_of_steps: epochs of a number of steps
  _stack: batches stacked into chunks
  _batch: inputs, labels and weights of a batch, and its size
  _arrays: checks which arrays jax can take
  _buffer: host memory that a CPU device takes without a copy
"""

from functrain.data._batches import Steps as Steps
from functrain.data._loader import ArrayLoader as ArrayLoader
