"""Where a state lies on many devices: meshes, rules, whole states.

Files:
  _collectives: what a compiled program sends from device to device
  _describe: what lies where, as a table
  _mesh: a mesh from the sizes of its axes
  _rules: rules that say how an array is divided
  _state: the shardings of a whole state, from those of its params
"""

from functrain.sharding._collectives import Moved, collectives
from functrain.sharding._describe import describe
from functrain.sharding._mesh import mesh
from functrain.sharding._rules import Rule, fsdp, replicated, rules
from functrain.sharding._state import create, put, shardings

__all__ = [
    "Moved",
    "Rule",
    "collectives",
    "create",
    "describe",
    "fsdp",
    "mesh",
    "put",
    "replicated",
    "rules",
    "shardings",
]
