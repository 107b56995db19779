"""Data: turns what users pass into batches and chunks.

Files:
  _batches: the protocol between data and the engine; loaders that can seek; NoData
  _adapt: converts what users pass to that protocol; batches of a loader that can seek
  _loader: ArrayLoader, batches of arrays in memory
  _iterator: batches of any iterable
  _iterator_position: saves and restores the position of an iterator
  _on_device: data that lie on a device as a whole
  _same_data: compares the data of a resumed run with those of the saved one
  _local: data of which each process holds a part
  _epochs_of_steps: epochs with a given number of steps
  _stack: stacks batches into chunks, in aligned memory
  _batch: inputs, labels and weights of a batch
  _arrays: converts leaves to arrays that jax supports
  _lookahead: an iterator whose next batch can be looked at
"""
