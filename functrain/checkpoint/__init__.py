"""States on disk: whole, or not at all, and the bytes that were saved.

``python -m functrain.checkpoint DIRECTORY`` lists, verifies and compares them.

Files:
  _checkpointer: the checkpoints of one training: written, kept, and read again
  _storage: one checkpoint on disk: its arrays and their digests, and how it gets its name
  _manifest: what is said of a checkpoint, as JSON beside its arrays
  _leaves: the leaves of a state: what is stored for each, and how it becomes a leaf again
  _processes: what the processes of one run do together
  _warm_start: a part of a state out of a checkpoint, or out of a file of others
  _errors: what is wrong with a checkpoint
"""

from functrain.checkpoint._checkpointer import Checkpointer as Checkpointer
from functrain.checkpoint._checkpointer import Restored as Restored
from functrain.checkpoint._errors import CheckpointCorruptError as CheckpointCorruptError
from functrain.checkpoint._errors import CheckpointMismatchError as CheckpointMismatchError
from functrain.checkpoint._storage import load as load
from functrain.checkpoint._storage import save as save
from functrain.checkpoint._warm_start import WarmStart as WarmStart
from functrain.checkpoint._warm_start import warm_start as warm_start
