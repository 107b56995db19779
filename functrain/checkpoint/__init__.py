"""States on disk: whole, or not at all, and the bytes that were saved.

``python -m functrain.checkpoint DIRECTORY`` lists, verifies and compares them.

Files:
  _checkpointer: saving a training now and then, and finding out where to go on
  _series: its checkpoints, written behind a run's back, and read again
  _single: save and load, one state in one directory
  _warm_start: a part of a state out of a file
  _files: arrays out of files of others: safetensors, HDF5, Keras's archives
  _directory: the checkpoints of one training, and their one writer
  _together: a checkpoint that several processes write
  _processes: what several processes agree on
  _store: one checkpoint, its arrays and their digests
  _arrays: how arrays get to the disk and back; saves of one process take turns
  _about: what a checkpoint says of itself
  _lock: the locks of writers
  _background: work in the background, of which nothing is lost in silence
  _place: how a checkpoint comes to stand in its place
  _leaves: the leaves of a state as a file knows them, and their digests
  _listing: what checkpoints there are, as tables that fit a terminal
  _compare: two checkpoints side by side
  _documents: what goes with a state, as JSON beside the arrays
  _fingerprint: what equal bits depend on, apart from the program
  _errors: what is wrong with a checkpoint
"""

from functrain.checkpoint._checkpointer import Checkpointer as Checkpointer
from functrain.checkpoint._errors import CheckpointCorruptError as CheckpointCorruptError
from functrain.checkpoint._errors import CheckpointMismatchError as CheckpointMismatchError
from functrain.checkpoint._series import Restored as Restored
from functrain.checkpoint._single import load as load
from functrain.checkpoint._single import save as save
from functrain.checkpoint._warm_start import WarmStart as WarmStart
from functrain.checkpoint._warm_start import warm_start as warm_start
