"""Helpers that every other package uses.

Files:
  _tree: paths and specs of pytree leaves for error messages, and copies of states
  _types: the types PyTree and Step, and the traits by which loops treat steps
  _log_values: the names of logs, whose type tells a loop what a log is, and their values
  _gather: fetching of arrays to the host, including arrays spread over processes
  _checks: argument checks
  _wide_integers: 64-bit integers that jax would truncate to 32 bits
  _arguments: signatures of functions
  _direction: which values are better when they are larger
  _hlo: instructions of compiled programs, and how often they run
  _platform: the platform that a program is compiled for
  _repr: short texts for large objects
  _patterns: selection of leaves by patterns over their paths
  _table: tables as text
  _warnings: warnings that show the user's source line
  _library: optional dependencies
  _paths: arguments that are paths
  _locks: file locks between processes
"""
