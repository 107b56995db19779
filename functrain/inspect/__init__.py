"""Diagnostics: the memory and the speed of a step, the placement of a state, the cause of a NaN.

Files:
  _placement: a table of the shards that each device holds
  _cost: the time, kernels and traffic of a step, as its compiler estimates them
  _explain_rewrites: the operations of a function that are rewritten, with reasons
  _explain_nan: a search for the operation that made the first NaN or infinity
  _fit_program: the program that a fit would run, lowered for shapes
  _largest_batch: the largest batch whose fit has room on a device
  _leaf: the shard of an array on one device
  _not_finite: the description of an operation that made NaN or an infinity
  _origins: a run that follows NaN and infinities from their origins
  _memory: the memory that a fit needs, from its compiled program
  _summary: a table of the leaves of a state, and the products of a step
"""

from functrain.inspect._cost import Cost as Cost
from functrain.inspect._cost import Layer as Layer
from functrain.inspect._cost import cost as cost
from functrain.inspect._explain_nan import explain_nan as explain_nan
from functrain.inspect._explain_rewrites import Explanation as Explanation
from functrain.inspect._explain_rewrites import explain_rewrites as explain_rewrites
from functrain.inspect._largest_batch import largest_batch as largest_batch
from functrain.inspect._memory import Memory as Memory
from functrain.inspect._memory import memory as memory
from functrain.inspect._not_finite import NotFinite as NotFinite
from functrain.inspect._placement import placement as placement
from functrain.inspect._summary import summary as summary
from functrain.rewrites._compile import MiscompilationWarning as MiscompilationWarning

__all__ = [
    "Cost",
    "Explanation",
    "Layer",
    "Memory",
    "MiscompilationWarning",
    "NotFinite",
    "cost",
    "explain_nan",
    "explain_rewrites",
    "largest_batch",
    "memory",
    "placement",
    "summary",
]
