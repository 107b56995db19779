"""Diagnostics: what a step costs, where a state lies, what went wrong.

Files:
  _autotune: measures how many steps to fuse
  _describe: a table of the parts of arrays that each device holds
  _doctor: checks this installation for known faults of XLA
  _explain: what the rewrites do to a function, and why
  _explain_nan: finds the operation that made the first NaN or infinity
  _leaf: the part of an array that lies on one device
  _memory: the memory that a fit needs, from its compiled program
  _sheet: tables of bytes as plain text
  _summary: a table of the leaves of a state or a model, and the cost of a step
"""

from functrain.inspect._autotune import autotune as autotune
from functrain.inspect._describe import describe as describe
from functrain.inspect._doctor import Doctor as Doctor
from functrain.inspect._doctor import doctor as doctor
from functrain.inspect._explain import Explanation as Explanation
from functrain.inspect._explain import explain as explain
from functrain.inspect._explain_nan import explain_nan as explain_nan
from functrain.inspect._memory import memory as memory
from functrain.inspect._summary import summary as summary

__all__ = [
    "Doctor",
    "Explanation",
    "autotune",
    "describe",
    "doctor",
    "explain",
    "explain_nan",
    "memory",
    "summary",
]
