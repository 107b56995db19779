"""Many steps in one program.

Files:
  _driver: a carry on its way through programs, and what becomes of it if one fails
  _programs: compiled programs, kept for as long as their step lives
  _loop: a body repeated over stacked batches
  _fuse: the same for users, as a function of a state and a chunk
  _chunks: from batches to chunks, fewer steps where something is due
  _plan: how many steps a program takes, by a rule
  _placement: where things lie on several devices
  _rows: what the steps of a chunk reported
  _position: how far a training has come
  _trigger: when something is due
  _signals: Ctrl-C and SIGTERM that lose nothing
  _guards: what watches over the tracing of a step
  _notes: notes on errors of a step: its batch, and what a traced value cannot do
  _cache: compiled programs on disk
"""

from functrain.engine._cache import enable_compilation_cache as enable_compilation_cache
from functrain.engine._fuse import Fused as Fused
from functrain.engine._fuse import fuse as fuse
from functrain.engine._position import Position as Position
from functrain.engine._trigger import Trigger as Trigger
from functrain.engine._trigger import at as at
from functrain.engine._trigger import every as every
