"""Helpers that everything else stands on.

Files:
  _tree: paths and specs for error messages, copies that nothing else can see
  _types: PyTree and Step, and what loops ask of a step
  _gather: values on the host, of several processes too
  _checks: argument checks
  _wide_integers: 64-bit integers that jax would cut to 32 bits
  _values: numbers by name, of a population one for each member
  _arguments: what functions take, and words for arguments of other libraries
  _direction: whether more is better, told by a value's name
  _compile: `jax.jit` without what XLA is known to compile wrongly
  _repr: short texts for large things
  _patterns: leaves chosen by patterns over their paths
  _table: tables as text
  _library: libraries that not everybody has
  _locks: file locks between processes
"""
