"""Many steps in one program.

Files:
  _driver: a carry on its way through programs, and what becomes of it if one fails
  _programs: compiled programs, kept for as long as their step lives
  _loop: a body repeated over stacked batches
  _fuse: the same for users, as a function of a state and a chunk
  _chunks: from batches to chunks, fewer steps where something is due
  _plan: how many steps a program takes, by a rule
  _summary: a state or a model as a table, and what a step costs
  _memory: what a fit will need of memory
  _sheet: the tables of both
  _doctor: which known faults of XLA this installation has
  _explain_nan: where the first number that is not finite came from
  _autotune: how many steps a program takes, measured
  _placement: where things lie on several devices
  _rows: what the steps of a chunk reported
  _position: how far a training has come
  _trigger: when something is due
  _signals: Ctrl-C and SIGTERM that lose nothing
  _guards: what watches over the tracing of a step
  _notes: notes on errors of a step: its batch, and what a traced value cannot do
  _cache: compiled programs on disk
"""

from functrain.engine._autotune import autotune as autotune
from functrain.engine._cache import enable_compilation_cache as enable_compilation_cache
from functrain.engine._doctor import Doctor as Doctor
from functrain.engine._doctor import doctor as doctor
from functrain.engine._explain_nan import explain_nan as explain_nan
from functrain.engine._fuse import Fused as Fused
from functrain.engine._fuse import fuse as fuse
from functrain.engine._memory import Memory as Memory
from functrain.engine._memory import memory as memory
from functrain.engine._position import Position as Position
from functrain.engine._summary import summary as summary
from functrain.engine._trigger import Trigger as Trigger
from functrain.engine._trigger import at as at
from functrain.engine._trigger import every as every
