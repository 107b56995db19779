"""Sharding: meshes, rules for params, and the shardings of whole states.

Files:
  _collectives: the traffic between devices in a compiled program
  _mesh: a mesh from the sizes of its axes
  _rules: rules that choose the sharding of an array
  _state: the shardings of a whole state, derived from those of its params
"""

from functrain.sharding._collectives import Traffic as Traffic
from functrain.sharding._collectives import collectives as collectives
from functrain.sharding._mesh import mesh as mesh
from functrain.sharding._rules import Rule as Rule
from functrain.sharding._rules import fsdp as fsdp
from functrain.sharding._rules import replicated as replicated
from functrain.sharding._rules import rules as rules
from functrain.sharding._state import create as create
from functrain.sharding._state import put as put
from functrain.sharding._state import shardings as shardings

__all__ = [
    "Rule",
    "Traffic",
    "collectives",
    "create",
    "fsdp",
    "mesh",
    "put",
    "replicated",
    "rules",
    "shardings",
]
