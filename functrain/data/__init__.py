"""Where batches come from.

Files:
  _loader: ArrayLoader, batches of arrays in memory
  _sources: passes over any data
  _repeated: data without end, cut into stretches
  _stream: a pass over an iterator of batches
  _resuming: where a pass is, to be saved and sought again
  _glimpse: a batch in a few words and numbers
  _local: data of which each process has a part
  _stacks: batches alike, stacked, as every pass hands them out
  _batch: inputs, labels and weights of a batch, and how many examples
  _arrays: which arrays jax can take
  _buffer: host memory that a CPU device takes without a copy
"""

from functrain.data._loader import ArrayLoader as ArrayLoader
