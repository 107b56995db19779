"""Saving a state and loading it back, bit for bit.

Files:
  _io: save and load
  _leaves: the leaves of a state as a file knows them
  _place: how a new checkpoint takes the place of an old one
"""

from functrain.checkpoint._io import load as load
from functrain.checkpoint._io import save as save
